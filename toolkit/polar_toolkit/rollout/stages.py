"""One try at an attempt, from stage to stage: INIT, RUN, POST. When each may begin is the runner's matter.

Invariant: every stage ends within its budget, and as one status with one sentence; when RUN is over, everything in the
harness's sandbox is dead and its session sealed. The status comes from the calls and the evaluator, never from the
harness's exit status.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from polar_mitm import identity
from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.evaluators import Verdict
from polar_toolkit.rollout.house import Failed as Failed
from polar_toolkit.rollout.house import House as House
from polar_toolkit.rollout.interceptor import SessionFigures
from polar_toolkit.rollout.judging import Evaluation
from polar_toolkit.rollout.options import Keep
from polar_toolkit.rollout.outcome import Outcome, Status
from polar_toolkit.rollout.recipe import command_of
from polar_toolkit.rollout.sandbox import HOME, Ended, Sandbox, SandboxError
from polar_toolkit.rollout.sandbox.folders import remove
from polar_toolkit.rollout.task import Attempt, Budget

_GRACE_S = 60.0
"""How long after its deadline a command's end is waited for: whoever runs it kills at the deadline itself."""
_FILES = {"stdout": "harness.out", "stderr": "harness.err", "patch": "patch.diff", "workspace": "workspace"}
"""Artifacts of every attempt that has them, in its folder."""


class Trial:
    """One try at an attempt. Stages are called in order, `close` at the end whatever happened, then `outcome`."""

    def __init__(self, house: House, attempt: Attempt) -> None:
        self.attempt = attempt
        self.seconds: dict[str, float] = {}
        """Of each stage that it was in, by the column's name."""
        self._house = house
        self._task = attempt.task
        self._folder = house.folder(attempt)
        self._evaluation = Evaluation(house, attempt)
        self._sandbox: Sandbox | None = None
        self._registered = False
        self._figures = SessionFigures()
        self._image = ""
        self._exit: int | None = None
        self._verdict: Verdict | None = None
        self._began = time.time()

    async def prepare(self) -> None:
        """INIT: register the session, make the harness's sandbox and fill it. Raises Failed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        budget = self._task.budget
        with self._timed("init_s"):
            try:
                async with asyncio.timeout(budget.init_s):
                    secret = await self._register()
                    self._sandbox = await self._house.make(self.attempt, self._house.network(self.attempt, secret))
                    self._image = self._sandbox.image
                    await self._house.furnish(self._sandbox, self._task, self._folder / "prepare")
                    await self._put_files(self._sandbox)
            except TimeoutError as error:
                note = f"not prepared within {budget.init_s:g} s: raise the task's init budget, or prepare less"
                raise Failed(Status.SETUP_FAILED, note, again=True) from error
            except SandboxError as error:
                raise Failed(Status.SETUP_FAILED, str(error), again=True) from error

    async def run(self) -> tuple[Status, str]:
        """RUN: the harness, from its start to its death; then no call of its session is answered any more.

        Returns the status and note of the row, should the work be judged. Raises Failed.
        """
        interceptor = self._house.interceptor
        restarts = interceptor.restarts
        self._evaluation.prepare()
        with self._timed("run_s"):
            ended = await self._perform()
        await self._seal()
        return self._status(ended, restarted=interceptor.restarts != restarts)

    async def judge(self) -> None:
        """POST: what the harness left is judged. Raises Failed."""
        assert self._sandbox
        with self._timed("post_s"):
            self._verdict = await self._evaluation.judge(self._sandbox)

    async def close(self, status: Status) -> None:
        """End and remove everything, whatever stage it was in; `status` decides what is kept for a look."""
        await self._evaluation.close()
        keep, workspace = self._house.options.keep, self._folder / "workspace"
        kept = keep is Keep.ALL or (keep is Keep.FAILED and status is not Status.COMPLETED)
        if self._sandbox:
            with suppress(SandboxError):  # it can only be closed
                await self._sandbox.kill()
                if kept and status is Status.HARNESS_ERROR:
                    await self._sandbox.take(self._task.environment.workdir, workspace)
            await self._sandbox.close()
        await self._seal()
        if not kept:
            await asyncio.to_thread(remove, workspace)

    def outcome(self, status: Status, note: str) -> Outcome:
        """The row; whether its reward is trained is not in it yet."""
        attempt, house, verdict = self.attempt, self._house, self._verdict
        return Outcome(
            attempt.attempt_id, attempt.session_id, attempt.group_id, self._task.task_id, attempt.sample,
            attempt.tried, attempt.seed, status,
            note=note or (verdict.note if verdict else ""),
            reward=verdict.reward if verdict else None,
            reward_parts=dict(verdict.parts) if verdict else {},
            exit_code=self._exit,
            init_s=self._spent("init_s"), ready_s=self._spent("ready_s"),
            run_s=self._spent("run_s"), post_s=self._spent("post_s"),
            calls=self._figures.calls, sampled_tokens=self._figures.sampled, refused_calls=self._figures.refused,
            harness=house.recipe.name, harness_version=house.recipe.version, way=house.way.name,
            sandbox=house.sandboxes.name, image=self._image,
            began=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            artifacts=self._artifacts(), metadata=self._task.metadata,
        )  # fmt: skip

    # --- INIT -----------------------------------------------------------------------------------------------------

    async def _register(self) -> str:
        budget = self._task.budget
        try:
            secret = await asyncio.to_thread(
                identity.register, self._house.options.run, self.attempt.session_id, self.attempt.group_id,
                turns=budget.turns, tokens=budget.tokens, allow_hosts=self._task.allow_hosts,
            )  # fmt: skip
        except ValueError as error:  # somebody else uses the run folder, for a session of this name
            raise Refusal(str(error)) from error
        self._registered = True
        return secret

    async def _put_files(self, sandbox: Sandbox) -> None:
        """The recipe's configuration files."""
        if not self._house.way.files:
            return
        with tempfile.TemporaryDirectory() as scratch:
            for name, text in self._house.way.files.items():
                file = Path(scratch) / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            await sandbox.put(Path(scratch), HOME)

    # --- RUN ------------------------------------------------------------------------------------------------------

    async def _perform(self) -> Ended:
        assert self._sandbox
        command = command_of(self._house.way, self._task.instruction, self._house.options.command)
        limit = self._task.budget.run_s
        try:
            async with asyncio.timeout(limit + _GRACE_S):
                ended = await self._sandbox.run(command, timeout_s=limit, log=self._folder / "harness")
                await self._sandbox.kill()
        except (SandboxError, TimeoutError) as error:
            note = str(error) or f"the sandbox did not end the harness within {limit + _GRACE_S:g} s"
            raise Failed(Status.HARNESS_ERROR, note, again=True) from error
        self._exit = ended.status
        return ended

    async def _seal(self) -> None:
        """Refuse all later calls of the session, and take its figures."""
        if not self._registered:
            return
        session = self.attempt.session_id
        await asyncio.to_thread(identity.seal, self._house.options.run, session)
        self._registered = False
        figures = await self._house.interceptor.figures((session,))
        self._figures = figures.sessions.get(session, self._figures)

    def _status(self, ended: Ended, *, restarted: bool) -> tuple[Status, str]:
        """What the run was, by its calls and by what ended it."""
        limits, budget = self._task.environment.limits, self._task.budget
        log = f"see {self._house.relative(self._folder / 'harness.err')}"
        if ended.by == "killed":
            raise Failed(Status.HARNESS_ERROR, "the harness was killed from outside of the rollout", again=True)
        if ended.by in ("disk", "memory"):
            limit = limits.disk_mb if ended.by == "disk" else limits.memory_mb
            raise Failed(Status.HARNESS_ERROR, f"used more than the {limit} MB of {ended.by} that its task allows")
        if not self._figures.calls:
            how = f"ended by its deadline of {budget.run_s:g} s" if ended.by == "deadline" else "ended"
            note = f"{how} without a completed model call (exit status {ended.status}); {log}"
            raise Failed(Status.HARNESS_ERROR, note, again=restarted)
        if restarted and ended.status and ended.by == "itself":
            note = f"the interceptor died meanwhile, and the harness ended with status {ended.status}; {log}"
            raise Failed(Status.HARNESS_ERROR, note, again=True)
        if ended.by == "deadline":
            return Status.TIMEOUT, f"ended by its deadline of {budget.run_s:g} s"
        used = _used_up(budget, self._figures)
        return (Status.TIMEOUT, used) if used else (Status.COMPLETED, "")

    # --- the row --------------------------------------------------------------------------------------------------

    def _artifacts(self) -> dict[str, str]:
        paths = {name: self._folder / file for name, file in _FILES.items()}
        paths |= dict(self._verdict.artifacts) if self._verdict else {}
        return {name: self._house.relative(path) for name, path in paths.items() if path.exists()}

    def _spent(self, stage: str) -> float:
        return round(self.seconds.get(stage, 0.0), 3)

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - began


def _used_up(budget: Budget, figures: SessionFigures) -> str:
    """Which budget the gateway ended the harness by, in a sentence."""
    if budget.turns is not None and figures.turns >= budget.turns and figures.refused:
        return f"ended by its budget of {budget.turns} turns"
    if budget.tokens is not None and figures.sampled >= budget.tokens:
        return f"ended by its budget of {budget.tokens} sampled tokens"
    return ""
