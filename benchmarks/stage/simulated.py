"""A rollout of which only the runner is real: sandboxes whose commands are waits, an engine with slots, its figures.

Invariant: time is real time and a slot of the engine is held by one harness at a time. Nothing is executed; a sandbox
is a few numbers, so what a process costs in CPU and memory is the runner's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polar_toolkit.environment import Proxy
from polar_toolkit.rollout.evaluators import Bench, Verdict
from polar_toolkit.rollout.interceptor import Figures, SessionFigures
from polar_toolkit.rollout.recipe import Recipe, Way
from polar_toolkit.rollout.sandbox import Command, Ended, Plan
from polar_toolkit.rollout.task import Attempt, Check, Environment, Task

PREPARE = "simulated-prepare"
HARNESS = "simulated-harness"
EVALUATE = "simulated-evaluate"


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds of each step."""

    prepare: float = 4.0
    engine: float = 6.0
    evaluate: float = 4.0


@dataclass(slots=True)
class Engine:
    """Slots, and how long they were taken between the first harness's start and the last one's end."""

    slots: int
    busy: float = 0.0
    first: float = float("inf")
    last: float = 0.0
    _free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)

    @property
    def share(self) -> float:
        """Of all slots' time."""
        return self.busy / (self.slots * (self.last - self.first))

    async def sample(self, seconds: float) -> None:
        """Hold a slot for so long."""
        self.first = min(self.first, time.monotonic())
        async with self._free:
            began = time.monotonic()
            await asyncio.sleep(seconds)
            self.busy += time.monotonic() - began
        self.last = time.monotonic()


class Room:
    """One sandbox: a wait for each of the three commands, nothing for any other."""

    image = "simulated"

    def __init__(self, engine: Engine, waits: Waits) -> None:
        self._engine, self._waits = engine, waits

    async def run(self, command: Command, *, timeout_s: float, log: Path) -> Ended:
        """Wait as long as the command is said to take."""
        words, began = " ".join(command.argv), time.monotonic()
        for suffix in (".out", ".err"):
            log.with_name(log.name + suffix).touch()
        if HARNESS in words:
            await self._engine.sample(self._waits.engine)
        elif PREPARE in words:
            await asyncio.sleep(self._waits.prepare)
        elif EVALUATE in words:
            await asyncio.sleep(self._waits.evaluate)
        return Ended(0, "itself", time.monotonic() - began)

    async def put(self, source: Path, target: str) -> None:
        """Nothing is copied."""

    async def take(self, source: str, target: Path) -> None:
        """An empty folder, as an empty workspace is."""
        target.mkdir(parents=True, exist_ok=True)

    async def kill(self) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """Nothing is left."""


class Rooms:
    """The sandboxes."""

    name = "simulated"

    def __init__(self, engine: Engine, waits: Waits) -> None:
        self._engine, self._waits = engine, waits

    async def check(self) -> str:
        """They can be made everywhere."""
        return "nothing"

    async def create(self, plan: Plan) -> Room:
        """One more."""
        return Room(self._engine, self._waits)

    async def sweep(self) -> int:
        """Nothing is ever left behind."""
        return 0

    async def close(self) -> None:
        """Nothing is shared."""


class Counter:
    """The interceptor: every session made one call of ten tokens."""

    restarts = 0

    def __init__(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.bundle = run / "ca-bundle.pem"
        self.bundle.write_text("")
        self.proxy = Proxy("127.0.0.1", 9, self.bundle, 0)

    async def start(self) -> None:
        """It always runs."""

    async def figures(self, sessions: Sequence[str] = ()) -> Figures:
        """One completed call of each session that is asked for."""
        one = SessionFigures(calls=1, running=0, sampled=10, refused=0)
        return Figures(calls=0, running=0, waiting=0, sampled=0, sessions=dict.fromkeys(sessions, one))

    async def close(self) -> None:
        """Nothing was started."""


class Judge:
    """The evaluator: one command in the sandbox of the evaluation, reward 1."""

    kind = "simulated"
    options: frozenset[str] = frozenset()

    async def evaluate(self, bench: Bench) -> Verdict:
        """Run it."""
        await bench.sandbox.run(Command((EVALUATE,)), timeout_s=bench.timeout_s, log=bench.logs / "evaluate")
        return Verdict(1.0)


def recipe(folder: Path) -> Recipe:
    """A harness of one command."""
    way = Way("only", "api.openai.com", "openai-chat", (HARNESS, "{task}"))
    return Recipe("simulated", "", "0", folder, way.name, {way.name: way})


def tasks(count: int) -> list[Task]:
    """Tasks whose preparation is one command."""
    check = Check(Judge.kind)
    environment = Environment(prepare=(PREPARE,))
    return [Task(f"task-{number}", "Do it.", check, environment) for number in range(1, count + 1)]


def attempts(some: Sequence[Task], samples: int) -> list[Attempt]:
    """All samples of all tasks, group after group."""
    return [Attempt(task, sample) for task in some for sample in range(1, samples + 1)]
