"""Runs the attempts of a rollout: which begins when, what is tried again, and what is enough.

Invariant: every attempt ends as one row, in memory bounded by the pools and not by the task list; the rows that are on
disk when this dies are all there is to know, and the next runner does exactly the rest. Groups are worked on in order,
so that they finish early. What an attempt does is told in stages.py; nothing here looks into a sandbox.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Protocol

from polar_mitm import identity
from polar_toolkit import rewards
from polar_toolkit.errors import Refusal
from polar_toolkit.rollout import evaluators, outcome
from polar_toolkit.rollout.board import Board, Stage
from polar_toolkit.rollout.evaluators import Evaluator
from polar_toolkit.rollout.harnesses import programs
from polar_toolkit.rollout.harnesses.programs import Found
from polar_toolkit.rollout.house import Counting, Failed, House, named_image
from polar_toolkit.rollout.options import Options as Options
from polar_toolkit.rollout.options import attempts
from polar_toolkit.rollout.outcome import Outcome, Status
from polar_toolkit.rollout.recipe import Recipe, command_of
from polar_toolkit.rollout.sandbox import Sandboxes
from polar_toolkit.rollout.stages import Trial
from polar_toolkit.rollout.state import State
from polar_toolkit.rollout.task import Attempt, Task

_LOOK_S = 1.0
"""Between two looks at whether the engine keeps up."""
STOPPED = "the rollout was stopped; polar-toolkit rollout --resume goes on with it"


class Intercepting(Counting, Protocol):
    """The interceptor, as a rollout has it."""

    async def start(self) -> None:
        """Run from now on. Raises Refusal when it cannot."""
        ...

    async def close(self) -> None:
        """Run no more."""
        ...


class Runner:
    """One rollout, from its first attempt, or its first missing one, to its last."""

    def __init__(
        self,
        options: Options,
        tasks: Sequence[Task],
        *,
        recipe: Recipe,
        sandboxes: Sandboxes,
        interceptor: Intercepting,
        board: Board,
        judge: Callable[[str], Evaluator] | None = None,
    ) -> None:
        """`judge` gives the evaluator of a kind, where it is not one of ours.

        Raises Refusal for what each attempt would stumble over: an unknown way or evaluator, a missing program.
        """
        self._options = options
        self._attempts = attempts(options, tasks)
        self._sandboxes = sandboxes
        self._interceptor = interceptor
        self._board = board
        self._house = _house(options, tasks, recipe, sandboxes, interceptor, judge or evaluators.find)
        self._pools = _Pools(options)
        self._state = State(options.run)
        self._outcomes: dict[str, Outcome] = {}
        self._rewarded: Counter[str] = Counter()
        """Attempts of each group that have a reward which is trained."""
        self._may_end: dict[str, tuple[Attempt, asyncio.Task[None]]] = {}
        """Attempts that may be cancelled at this moment: not those that clean up or write their row."""
        self._stopping = False
        self._keeps_up = asyncio.Event()
        self._keeps_up.set()

    async def run(self, shown: AbstractAsyncContextManager[None] | None = None) -> list[Outcome]:
        """Work on all attempts that are not done, and write RUN/rollouts.parquet. One row of each attempt comes back.

        `shown` is open while attempts are worked on. Raises Refusal when another runner works on the run folder or
        the interceptor cannot be started.
        """
        with self._state:
            await self._recover()
            try:
                await self._interceptor.start()
                async with shown or nullcontext():
                    await self._work()
            except* Refusal as refusals:  # the rollout cannot go on; what was cut short is missing still
                raise _first(refusals) from None
            finally:
                await self._interceptor.close()
                await self._sandboxes.close()
                rows = [self._outcomes.get(a.attempt_id) or self._unbegun(a) for a in self._attempts]
                await asyncio.to_thread(outcome.write, self._options.run, rows)
        return rows

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    def stop(self) -> None:
        """Begin nothing more and end what runs; `run` comes back when all is cleaned up. May be called at any time."""
        self._stopping = True
        self._cancel()

    async def _recover(self) -> None:
        """Clean up after an earlier runner that died, and take over what it got done."""
        past = self._state.past
        self._state.note("started", attempts=len(self._attempts), done=len(past.outcomes))
        if past.tried:
            await self._sandboxes.sweep()
        for session in past.open:
            with suppress(ValueError):  # it died before it registered the session
                await asyncio.to_thread(identity.seal, self._options.run, session)
        scored = await asyncio.to_thread(rewards.read, self._options.run)
        for done in past.outcomes.values():
            self._count(done)
            if done.trained and done.session_id not in scored:  # it died between the two
                await self._reward(done)

    # --- the attempts ---------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as watching:
            watch = watching.create_task(self._watch_engine())
            async with asyncio.TaskGroup() as working:
                for attempt in self._missing():
                    await self._pools.ready.acquire()  # given back by the attempt: there are never more than these
                    if self._stopping:
                        break
                    working.create_task(self._attempt(attempt))
            watch.cancel()

    def _missing(self) -> Iterator[Attempt]:
        return (attempt for attempt in self._attempts if attempt.attempt_id not in self._outcomes)

    async def _attempt(self, attempt: Attempt) -> None:
        """Try until it is done. A place in READY was acquired for each try, which gives it back."""
        first = self._state.past.tried.get(attempt.attempt_id, 0) + 1
        done, again = await self._try(replace(attempt, tried=first))
        for tried in range(first + 1, first + self._options.tries):
            if not again or self._why(attempt):
                break
            self._state.note("again", attempt_id=attempt.attempt_id, session_id=done.session_id, note=done.note)
            await self._pools.ready.acquire()
            done, again = await self._try(replace(attempt, tried=tried))
        cancelled = done.status is Status.CANCELLED and not self._has_enough(attempt.group_id)
        await self._end(done, missing=cancelled or (again and self._stopping))

    async def _try(self, attempt: Attempt) -> tuple[Outcome, bool]:
        """One try, cleaned up. Its row, and whether another try may do better."""
        trial = Trial(self._house, attempt)
        status, note, again = Status.CANCELLED, self._why(attempt), False
        try:
            with ExitStack() as place:
                place.callback(self._pools.ready.release)
                if not note:
                    with self._cancellable(attempt):
                        status, note = await self._through(trial, place)
        except Failed as failed:
            status, note, again = failed.status, failed.note, failed.again
        except asyncio.CancelledError:  # by `_cancel`; when something else broke, the row is missing still
            note = self._why(attempt) or STOPPED
        finally:
            await trial.close(status)
        return trial.outcome(status, note), again

    async def _through(self, trial: Trial, place: ExitStack) -> tuple[Status, str]:
        """From stage to stage, each when there is room in it; `place` is the one in READY. Raises Failed."""
        pools = self._pools
        async with pools.init:
            self._enter(trial, Stage.INIT)
            await self._state.began(trial.attempt)
            await trial.prepare()
        self._enter(trial, Stage.READY)
        waits = time.monotonic()
        async with pools.unjudged:
            async with pools.run:
                await self._keeps_up.wait()
                trial.seconds["ready_s"] = time.monotonic() - waits
                place.close()
                self._enter(trial, Stage.RUN)
                status, note = await trial.run()
            self._enter(trial, Stage.POST)
            async with pools.post:
                await trial.judge()
        return status, note

    def _enter(self, trial: Trial, stage: Stage) -> None:
        self._board.enter(trial.attempt.attempt_id, stage)
        self._state.note("stage", session_id=trial.attempt.session_id, stage=stage)

    # --- the ends -------------------------------------------------------------------------------------------------

    async def _end(self, done: Outcome, *, missing: bool) -> None:
        """Write the row down, then the reward: what died between the two is made up for by the next runner."""
        if done.reward is None and done.status is Status.HARNESS_ERROR and done.status in self._options.rewarded:
            done = replace(done, reward=0.0)
        done = replace(done, trained=done.reward is not None and done.status in self._options.rewarded)
        await self._state.ended(done, missing=missing)
        self._count(done)
        if done.trained:
            await self._reward(done)
        if self._has_enough(done.group_id):
            self._cancel()

    def _count(self, done: Outcome) -> None:
        self._outcomes[done.attempt_id] = done
        self._rewarded[done.group_id] += done.trained
        self._board.end(done)

    async def _reward(self, done: Outcome) -> None:
        assert done.reward is not None  # or it would not be trained
        await asyncio.to_thread(rewards.append, self._options.run, {done.session_id: done.reward})

    def _unbegun(self, attempt: Attempt) -> Outcome:
        return Trial(self._house, attempt).outcome(Status.CANCELLED, self._why(attempt) or STOPPED)

    def _has_enough(self, group_id: str) -> bool:
        return self._options.enough is not None and self._rewarded[group_id] >= self._options.enough

    def _why(self, attempt: Attempt) -> str:
        """Why it is not to be gone on with; "" when it is."""
        if self._has_enough(attempt.group_id):
            return f"its group had enough: {self._rewarded[attempt.group_id]} attempts with a reward"
        return STOPPED if self._stopping else ""

    def _cancel(self) -> None:
        """End the attempts that there is a reason not to go on with."""
        for attempt, task in list(self._may_end.values()):
            if self._why(attempt):
                self._may_end.pop(attempt.attempt_id)
                task.cancel()

    @contextmanager
    def _cancellable(self, attempt: Attempt) -> Generator[None]:
        task = asyncio.current_task()
        assert task
        self._may_end[attempt.attempt_id] = (attempt, task)
        try:
            yield
        finally:
            self._may_end.pop(attempt.attempt_id, None)

    # --- the engine -----------------------------------------------------------------------------------------------

    async def _watch_engine(self) -> None:
        """Hold new runs back while calls queue up at the engine."""
        while True:
            figures = await self._interceptor.figures()
            saturated = figures.waiting >= max(2, figures.running / 2)
            if saturated == self._keeps_up.is_set():
                reason = f"the engine is saturated ({figures.waiting} of {figures.running} calls wait)"
                self._hold(reason if saturated else "")
            await asyncio.sleep(_LOOK_S)

    def _hold(self, reason: str) -> None:
        (self._keeps_up.clear if reason else self._keeps_up.set)()
        self._board.hold(reason)
        self._state.note("hold", reason=reason)


class _Pools:
    """How many attempts may be where."""

    def __init__(self, options: Options) -> None:
        pools = options.pools
        self.init, self.ready = asyncio.Semaphore(pools.init), asyncio.Semaphore(pools.ready)
        self.run, self.post = asyncio.Semaphore(pools.run), asyncio.Semaphore(pools.post)
        self.unjudged = asyncio.Semaphore(2 * pools.run + pools.post)
        """In RUN and POST together: when judging is too slow, running has to wait in the end."""


def _first(group: BaseExceptionGroup[Refusal]) -> Refusal:
    """One of several is enough to say why."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _house(
    options: Options,
    tasks: Sequence[Task],
    recipe: Recipe,
    sandboxes: Sandboxes,
    interceptor: Counting,
    judge: Callable[[str], Evaluator],
) -> House:
    """Raises Refusal for what each attempt would stumble over."""
    way = recipe.way(options.way)
    command_of(way, "", options.command)
    for kind in {task.check.kind for task in tasks}:
        judge(kind)
    image = ""
    if sandboxes.name == "docker" and (recipe.folder / "Dockerfile").is_file():
        from polar_toolkit.rollout.harnesses import images  # the docker SDK takes half a second to import

        image = images.name_of(recipe) if images.is_built(recipe) else ""  # else on this machine's own programs
    mounted = not image or any(map(named_image, tasks))
    found = programs.needed(recipe) if mounted and recipe.programs else Found((), "")
    return House(options, recipe, way, found, image, sandboxes, interceptor, judge)
