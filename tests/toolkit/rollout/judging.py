"""Work done in one real sandbox and judged in another, as a rollout does it, but for the harness and its model."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from polar_toolkit.rollout import evaluators, repository
from polar_toolkit.rollout.evaluators import Bench, Verdict
from polar_toolkit.rollout.sandbox import Command, Ended, Mount, Plan, Sandbox, sandboxes
from polar_toolkit.rollout.task import TESTS, Task

PYTHON = f"{sys.prefix}/bin/python"
"""Inside, too: the interpreter that has pytest."""
_MOUNTS = tuple(Mount(Path(prefix), prefix) for prefix in dict.fromkeys((sys.prefix, sys.base_prefix)))
_SECONDS = 60


def judged(task: Task, work: str, folder: Path, kind: str = "local") -> Verdict:
    """The verdict on what a shell script did in the workspace; what the script printed is the harness's output."""
    return asyncio.run(_judged(task, work, folder, kind))


def printed(task: Task, work: str, folder: Path) -> str:
    """What a shell script prints in the harness's sandbox of a task."""

    async def run() -> str:
        async with _sandbox(task, folder, "s1", "local") as sandbox:
            await _sh(sandbox, work, folder / "harness")
        return (folder / "harness.out").read_text(errors="replace")

    return asyncio.run(run())


async def _judged(task: Task, work: str, folder: Path, kind: str) -> Verdict:
    (folder / "workspace").mkdir()
    (folder / "evaluation").mkdir()
    carries_patch = task.check.carry == "patch"
    async with _sandbox(task, folder, "s1", kind) as sandbox:
        await _sh(sandbox, work, folder / "harness")
        await sandbox.kill()
        if carries_patch:
            script = repository.difference(task.environment.base_commit)
            ended = await _sh(sandbox, script, folder / "patch.diff")
            assert ended.status == 0, (folder / "patch.diff.err").read_text()
        else:
            await sandbox.take(task.environment.workdir, folder / "workspace")
    async with _sandbox(task, folder, "s1.eval", kind) as sandbox:
        if carries_patch:
            await sandbox.put(folder / "patch.diff.out", "/tmp/patch")
            ended = await _sh(sandbox, repository.apply("/tmp/patch"), folder / "apply")
            assert ended.status == 0, (folder / "apply.err").read_text()
        else:
            await _sh(sandbox, "find . -mindepth 1 -delete", folder / "empty")
            await sandbox.put(folder / "workspace", task.environment.workdir)
        if task.check.tests:
            await sandbox.put(task.check.tests, TESTS)
        bench = Bench(
            task, sandbox, folder / "harness.out", folder / "workspace", folder / "evaluation", task.budget.post_s
        )
        return await evaluators.find(task.check.kind).evaluate(bench)


@asynccontextmanager
async def _sandbox(task: Task, folder: Path, name: str, kind: str) -> AsyncGenerator[Sandbox]:
    """A sandbox as INIT leaves it."""
    environment = task.environment
    made = sandboxes(kind, folder, f"judging-{secrets.token_hex(4)}")
    sandbox = await made.create(Plan(name, folder / name, replace(environment, image=""), _MOUNTS))
    try:
        if environment.workspace:
            await sandbox.put(environment.workspace, environment.workdir)
        for line in environment.prepare:
            await _sh(sandbox, line, folder / "prepare")
        if environment.base_commit:
            ended = await _sh(sandbox, repository.cut_history(environment.base_commit), folder / "cut")
            assert ended.status == 0, (folder / "cut.err").read_text()
        yield sandbox
    finally:
        await sandbox.close()
        await made.close()


async def _sh(sandbox: Sandbox, script: str, log: Path) -> Ended:
    return await sandbox.run(Command(("sh", "-c", script)), timeout_s=_SECONDS, log=log)
