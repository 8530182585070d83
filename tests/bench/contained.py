"""A real harness performs its two-turn task inside a sandbox, through a real mitmdump and a scripted engine.

Invariant: the harness is told nothing of a proxy and holds no credentials: its sandbox's network leads to the
interceptor. It runs as whoever starts it, root or not; whoever starts it sees to it that the network goes nowhere.

    python -m tests.bench.contained HARNESS WAY FOLDER [WORD=OTHER WORDS ...]   # prints what was left, as JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from polar_mitm import identity
from polar_toolkit import environment
from polar_toolkit.rollout import recipe
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from polar_toolkit.rollout.sandbox import BUNDLE, CA, HOME, Command, Ended, Mount, Network, Plan, Sandboxes
from polar_toolkit.rollout.sandbox.local import Local
from polar_toolkit.rollout.task import Environment
from tests.bench.interception import Interception
from tests.bench.provisions import HARNESS_BIN, qwen3_tokenizer
from tests.harness.performance import TASK, actor, completed

SESSION = "one.1"
SECONDS = 90
Kind = Callable[[Path, str], Sandboxes]
_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, slots=True)
class Left:
    """What a performance left behind."""

    status: int
    by: str
    seconds: float
    made_s: float
    """How long it took to make the sandbox."""
    output: str
    greeting: str
    """What hello.txt holds; '' when there is none."""
    calls: list[str]
    """The session of each completed call."""
    refused: Mapping[str, int]


class Here:
    """Stands for a namespace: the network that we are in already."""

    @contextmanager
    def entered(self) -> Generator[None]:
        """Nothing is left, nothing is entered."""
        yield


def perform(harness: str, way: str, folder: Path, replaced: Mapping[str, str] = {}, *, kind: Kind = Local) -> Left:
    """Run the harness; `replaced` are words of its command, each with the words that stand for it."""
    (left,) = perform_together(harness, way, folder, (SESSION,), replaced, kind=kind)
    return left


def perform_together(
    harness: str, way: str, folder: Path, sessions: Sequence[str], replaced: Mapping[str, str] = {}, *, kind: Kind,
    listen_host: str = "127.0.0.1",
) -> list[Left]:  # fmt: skip
    """Run the harness in as many sandboxes as sessions, at the same time and behind one interceptor."""
    engine = ScriptedEngine(qwen3_tokenizer(), actor(harness))
    folder.mkdir(parents=True, exist_ok=True)
    with engine.serving():
        bench = Interception(folder, Here(), engine)  # pyright: ignore[reportArgumentType]  # all it needs is `entered`
        with bench.proxy(listen_host=listen_host):
            return asyncio.run(_all_contained(bench.run, folder, recipe.find(harness), way, sessions, replaced, kind))


async def _all_contained(
    run: Path, folder: Path, harness: recipe.Recipe, way: str, sessions: Sequence[str], replaced: Mapping[str, str],
    make: Kind,
) -> list[Left]:  # fmt: skip
    kind = make(run, "bench")
    folders = [folder / session for session in sessions]
    for each in folders:
        each.mkdir()
    try:
        all_of_them = (_contained(run, each, harness, way, replaced, kind) for each in folders)
        return await asyncio.gather(*all_of_them)
    finally:
        await kind.close()


async def _contained(
    run: Path, folder: Path, harness: recipe.Recipe, way: str, replaced: Mapping[str, str], kind: Sandboxes
) -> Left:
    """In a folder whose name is the session's."""
    session = folder.name
    chosen = harness.way(way)
    proxy = environment.read_proxy(run)
    bundle = environment.write_bundle(run, proxy.ca)
    secret = identity.register(run, session, "one")
    names = (chosen.host, *harness.names)
    network = Network((proxy.host, proxy.port), session, secret, names, bundle, proxy.ca)
    programs = HARNESS_BIN.parent
    plan = Plan(
        session, folder / "sandbox", Environment(), (Mount(programs, str(programs)),),
        {**environment.trust(BUNDLE, CA), "PATH": f"{HARNESS_BIN}:{_PATH}"}, network,
    )  # fmt: skip
    began = time.monotonic()
    sandbox = await kind.create(plan)
    made = time.monotonic() - began
    try:
        for path, text in chosen.files.items():
            (folder / "file").write_text(text)
            await sandbox.put(folder / "file", f"{HOME}/{path}")
        ended = await sandbox.run(_command(chosen, replaced), timeout_s=SECONDS, log=folder / "harness")
        await sandbox.take(plan.environment.workdir, folder / "work")
        return _left(run, folder, ended, made, dict(getattr(sandbox, "refused", {})))
    finally:
        await sandbox.close()


def _command(way: recipe.Way, replaced: Mapping[str, str]) -> Command:
    command = recipe.command_of(way, TASK)
    words = [part for word in command.argv for part in (replaced[word].split() if word in replaced else [word])]
    return Command(tuple(words), command.env, command.cwd, command.stdin)


def _left(run: Path, folder: Path, ended: Ended, made: float, refused: Mapping[str, int]) -> Left:
    output = "".join((folder / f"harness.{stream}").read_text(errors="replace") for stream in ("out", "err"))
    hello = folder / "work" / "hello.txt"
    greeting = hello.read_text() if hello.exists() else ""
    calls = [row["session_id"] for row in completed(run)]
    return Left(ended.status, ended.by, ended.seconds, made, output, greeting, calls, refused)


if __name__ == "__main__":
    pairs = (pair.split("=", 1) for pair in sys.argv[4:])
    print(json.dumps(asdict(perform(sys.argv[1], sys.argv[2], Path(sys.argv[3]), dict(pairs)))))
