"""Sandboxes, an interceptor and an evaluator that act a part: what they do is told by the test, what they did is noted.

Invariant: whatever is made is counted until it is closed; nothing is executed and nothing waits but where a test says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from polar_toolkit.environment import Proxy
from polar_toolkit.rollout.board import Board
from polar_toolkit.rollout.evaluators import Bench, Verdict
from polar_toolkit.rollout.interceptor import Figures, SessionFigures
from polar_toolkit.rollout.options import Options, Pools, attempts
from polar_toolkit.rollout.recipe import Recipe, Way
from polar_toolkit.rollout.runner import Runner
from polar_toolkit.rollout.sandbox import Command, Ended, Plan
from polar_toolkit.rollout.task import Check, Environment, Task

AGENT = "agent"
_PROXY = Proxy("127.0.0.1", 9, Path("ca.pem"), 0)
Part = Callable[["Room", Command], Awaitable[Ended]]


async def well(room: Room, command: Command) -> Ended:
    """Everything works."""
    return Ended(0, "itself", 0.0)


@dataclass(slots=True)
class Room:
    """One sandbox."""

    plan: Plan
    stage: Stage
    image: str = "acted"

    @property
    def judging(self) -> bool:
        """Whether it is an evaluation's."""
        return self.plan.network is None

    async def run(self, command: Command, *, timeout_s: float, log: Path) -> Ended:
        self.stage.did.append((self.plan.name, "run", command.argv[0]))
        for suffix in ("out", "err"):
            log.with_name(f"{log.name}.{suffix}").write_text("words")
        return await self.stage.part(self, command)

    async def put(self, source: Path, target: str) -> None:
        self.stage.did.append((self.plan.name, "put", target))

    async def take(self, source: str, target: Path) -> None:
        self.stage.did.append((self.plan.name, "take", source))
        target.mkdir(exist_ok=True)
        (target / "work.txt").write_text(self.plan.name)

    async def kill(self) -> None:
        self.stage.did.append((self.plan.name, "kill", ""))

    async def close(self) -> None:
        self.stage.open.pop(self.plan.name, None)


@dataclass(slots=True)
class Stage:
    """The sandboxes, the interceptor and the evaluators of a rollout, in one: all that the runner sees of the world."""

    run: Path
    part: Part = well
    reward: Callable[[Bench], float] = lambda bench: 1.0
    calls: Callable[[str], int] = lambda session: 1
    """Of a session."""
    waiting: int = 0
    restarts: int = 0
    name: str = "acted"
    kind: str = "command"
    did: list[tuple[str, str, str]] = field(default_factory=list)
    """Sandbox, what, and with what."""
    open: dict[str, Room] = field(default_factory=dict)
    most: int = 0
    """Sandboxes at once."""
    swept: int = 0
    proxy: Proxy = _PROXY
    bundle: Path = Path("bundle.pem")

    async def check(self) -> str:
        return "acted"

    async def create(self, plan: Plan) -> Room:
        room = self.open[plan.name] = Room(plan, self)
        self.most = max(self.most, len(self.open))
        return room

    async def sweep(self) -> int:
        self.swept += 1
        return 0

    async def start(self) -> None:
        """The interceptor's."""

    async def close(self) -> None:
        """Both the interceptor's and the sandboxes'."""

    async def figures(self, sessions: Sequence[str] = ()) -> Figures:
        known = {name: SessionFigures(calls=self.calls(name), sampled=10 * self.calls(name)) for name in sessions}
        return Figures(running=8, waiting=self.waiting, sessions=known)

    async def evaluate(self, bench: Bench) -> Verdict:
        self.did.append((bench.sandbox.plan.name, "evaluate", ""))  # type: ignore[attr-defined]  # it is a Room
        return Verdict(self.reward(bench))


def recipe() -> Recipe:
    """A harness of one command."""
    way = Way("only", "api.openai.com", "openai-chat", (AGENT, "{task}"))
    return Recipe("acted", "", "1.0", Path(), way.name, {way.name: way})


def tasks(*names: str) -> list[Task]:
    """Tasks whose instruction is their name."""
    return [Task(name, name, Check("command"), Environment(prepare=("prepare",))) for name in names]


def options(run: Path, **changes: object) -> Options:
    """One sample of each task, one place in each pool."""
    asked = Options(run, "acted", "http://127.0.0.1:9", samples=1, pools=Pools(1, 2, 1, 1))
    return replace(asked, **changes)  # type: ignore[arg-type]  # fields by name


def runner(asked: Options, todo: Sequence[Task], stage: Stage, board: Board | None = None) -> Runner:
    """The real runner on this stage."""
    board = board or Board(attempts(asked, todo))
    return Runner(
        asked, todo, recipe=recipe(), sandboxes=stage, interceptor=stage, board=board, judge=lambda kind: stage
    )


async def until(fact: Callable[[], bool]) -> None:
    """Let others work until something is so; a test that waits in vain is ended by its own deadline."""
    while not fact():
        await asyncio.sleep(0.001)
