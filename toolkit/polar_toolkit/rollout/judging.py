"""POST of one try: the work is taken out of the harness's sandbox and judged in a fresh one that never saw the harness.

Invariant: all that ran in the harness's sandbox is dead before its work is looked at; what judges is put in place after
that, and nothing that the harness wrote is run on the host. The sandbox is prepared while the harness still runs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from polar_toolkit.rollout import repository
from polar_toolkit.rollout.evaluators import Bench, EvaluatorError, Verdict
from polar_toolkit.rollout.house import Failed, House
from polar_toolkit.rollout.options import Keep
from polar_toolkit.rollout.outcome import Status
from polar_toolkit.rollout.sandbox import LOG_BYTES, Command, Sandbox, SandboxError
from polar_toolkit.rollout.task import TESTS, Attempt

_PATCH = "/tmp/polar.patch"
"""Where the harness's patch lies in the sandbox of the evaluation."""
_EMPTY = Command(("find", ".", "-mindepth", "1", "-delete"))


class Evaluation:
    """The evaluation of one try."""

    def __init__(self, house: House, attempt: Attempt) -> None:
        self._house = house
        self._attempt = attempt
        self._task = attempt.task
        self._folder = house.folder(attempt)
        self._prepared: asyncio.Task[Sandbox] | None = None
        self._open: list[Sandbox] = []
        self._collected = False

    def prepare(self) -> None:
        """Begin to make the sandbox, while something else goes on."""
        self._prepared = asyncio.create_task(self._make())

    async def judge(self, work: Sandbox) -> Verdict:
        """Judge what is in the harness's sandbox, which is closed when the work was taken. Raises Failed."""
        limit = self._task.budget.post_s
        note = ""
        for _ in range(self._house.options.tries):
            try:
                async with self._fresh() as sandbox, asyncio.timeout(limit):
                    await self._collect(work)
                    return await self._evaluate(sandbox)
            except TimeoutError:
                note = f"not judged within {limit:g} s: raise the task's post budget, or look at its evaluator"
                break
            except SandboxError as error:  # the machine's fault: the work is still there to be judged
                note = str(error)
            except EvaluatorError as error:
                note = str(error)
                break
        raise Failed(Status.EVALUATOR_FAILED, note, again=not self._collected)

    async def close(self) -> None:
        """End it and remove its sandbox, at whatever point it is."""
        if self._prepared:
            self._prepared.cancel()
            await asyncio.gather(self._prepared, return_exceptions=True)
            self._prepared = None
        while self._open:
            await self._open.pop().close()

    @asynccontextmanager
    async def _fresh(self) -> AsyncGenerator[Sandbox]:
        """The sandbox that was prepared, or a new one; closed when the block ends."""
        try:
            yield await (self._prepared or self._make())
        finally:
            await self.close()

    async def _make(self) -> Sandbox:
        """A sandbox as the harness's was before it began. Raises SandboxError."""
        limit = self._task.budget.init_s
        try:
            async with asyncio.timeout(limit):
                sandbox = await self._house.make(self._attempt, None)
                self._open.append(sandbox)
                await self._house.furnish(sandbox, self._task, self._folder / "prepare-evaluation")
        except TimeoutError as error:
            raise SandboxError(f"the sandbox of the evaluation was not prepared within {limit:g} s") from error
        return sandbox

    async def _collect(self, work: Sandbox) -> None:
        """Take what the harness made out of its sandbox, once, and close that."""
        if self._collected:
            return
        if self._task.environment.base_commit:
            await self._make_patch(work)
        if self._task.check.carry == "workspace" or self._house.options.keep is Keep.ALL:
            await work.take(self._task.environment.workdir, self._folder / "workspace")
        self._collected = True
        await work.close()

    async def _make_patch(self, work: Sandbox) -> None:
        """The difference to the base commit. A harness that broke its repository has none: that is judged, too."""
        script = repository.difference(self._task.environment.base_commit)
        log = self._folder / "difference"
        ended = await work.run(Command(("sh", "-c", script)), timeout_s=self._task.budget.post_s, log=log)
        patch = log.with_name("difference.out").replace(self._folder / "patch.diff")
        if ended.status:
            patch.write_bytes(b"")
        elif patch.stat().st_size > LOG_BYTES:
            raise EvaluatorError(f"the harness's patch is larger than {LOG_BYTES} bytes")

    async def _evaluate(self, sandbox: Sandbox) -> Verdict:
        task, logs, workspace = self._task, self._folder / "evaluation", self._folder / "workspace"
        logs.mkdir(exist_ok=True)
        workspace.mkdir(exist_ok=True)
        await self._carry(sandbox, workspace, logs / "carry")
        if task.check.tests:
            await sandbox.put(task.check.tests, TESTS)
        bench = Bench(task, sandbox, self._folder / "harness.out", workspace, logs, task.budget.post_s)
        verdict = await self._house.judge(task.check.kind).evaluate(bench)
        if not math.isfinite(verdict.reward):
            raise EvaluatorError(f"the evaluator {task.check.kind!r} gave the reward {verdict.reward!r}: no number")
        return verdict

    async def _carry(self, sandbox: Sandbox, workspace: Path, log: Path) -> None:
        """The harness's work takes the place of the workspace, or is added to it as a patch."""
        whole = self._task.check.carry == "workspace"
        if not whole:
            await sandbox.put(self._folder / "patch.diff", _PATCH)
        how = _EMPTY if whole else Command(("sh", "-c", repository.apply(_PATCH)))
        ended = await sandbox.run(how, timeout_s=self._task.budget.post_s, log=log)
        if ended.status:
            see = self._house.relative(log.with_name(f"{log.name}.err"))
            raise EvaluatorError(
                f"the work cannot be carried into the sandbox of the evaluation (status {ended.status}); see {see}"
            )
        if whole:
            await sandbox.put(workspace, self._task.environment.workdir)
