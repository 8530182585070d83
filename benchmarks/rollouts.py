"""What a rollout costs: how busy the engine is kept, how fast a prepared attempt starts, what the runner takes itself.

Prints each figure with its limit. Run time is real time. `--only WORD` runs the measures whose names hold a word;
`--quick` makes everything tiny, where the limits mean nothing. Takes about seven minutes, most of them waits.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.stage.figures import Figure, show
from benchmarks.stage.processes import ROOT
from benchmarks.stage.processes import engine as serving
from benchmarks.stage.simulated import Counter, Engine, Judge, Rooms, Waits, attempts, recipe, tasks
from polar_toolkit.rollout.board import Board
from polar_toolkit.rollout.harnesses.programs import Found
from polar_toolkit.rollout.house import House
from polar_toolkit.rollout.interceptor import Interceptor
from polar_toolkit.rollout.options import Options, Pools
from polar_toolkit.rollout.outcome import Outcome, Status
from polar_toolkit.rollout.recipe import find
from polar_toolkit.rollout.runner import Runner
from polar_toolkit.rollout.sandbox import Command, Plan, Sandbox, sandboxes
from polar_toolkit.rollout.stages import Trial
from polar_toolkit.rollout.task import Attempt, Check, Environment, Task
from polar_train.small_models import fetch

CONSOLE = Console(width=None if sys.stdout.isatty() else 150)
TIME = ("/bin/bash", "-c", "echo $EPOCHREALTIME")
"""A command whose first instruction says when it was reached, in seconds."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    tasks: int = 8
    """Of eight attempts each, staged and unstaged."""
    waits: Waits = field(default_factory=Waits)
    starts: int = 50
    real: int = 2
    """Tasks of eight attempts each by Pi."""
    many: int = 1_000
    """Simulated attempts whose memory is watched."""


QUICK = Size(tasks=2, waits=Waits(0.2, 0.3, 0.2), starts=5, real=1, many=40)
WORKERS = 8
PLACES = 4 * WORKERS
"""Attempts that the pools hold; peaks vary by a part of them, and a leak of one for each attempt would be hundreds."""


# --- many -----------------------------------------------------------------------------------------------------------


def many(size: Size) -> Iterator[Figure]:
    """Simulated attempts without any waits: what the runner itself takes, and whether it grows."""
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        looks = asyncio.run(_watched(Path(folder) / "run", size.many))
    cpu = time.process_time() - began
    first = len(looks) // 10
    before, after = (Look(*map(max, zip(*map(astuple, some), strict=True))) for some in (looks[:first], looks[first:]))
    yield Figure(f"CPU of the runner, {len(looks)} simulated attempts", cpu / len(looks), 1, "s an attempt")
    beside = f"{before.memory:.0f} MB until attempt {first}, {after.memory:.0f} MB until {len(looks)}"
    yield Figure("memory grown after a tenth of them", after.memory - before.memory, 16, "MB", beside)
    beside = f"at most {before.tasks} until attempt {first}, {after.tasks} later"
    yield Figure("more tasks of the event loop", after.tasks - before.tasks, PLACES, "", beside)
    beside = f"at most {before.files} until attempt {first}, {after.files} later"
    yield Figure("more open files", after.files - before.files, PLACES, "", beside)


@dataclass(frozen=True, slots=True)
class Look:
    """The process at one moment."""

    memory: float
    """Resident, in MB."""
    tasks: int
    files: int


async def _watched(run: Path, count: int) -> list[Look]:
    """A look at the end of each attempt."""
    looks: list[Look] = []
    rows = await _staged(run, Engine(WORKERS), Waits(0, 0.001, 0), count // 8, lambda _: looks.append(_look()))
    assert {row.status for row in rows} == {Status.COMPLETED}, rows[0]
    return looks


def _look() -> Look:
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return Look(memory, len(asyncio.all_tasks()), sum(1 for _ in Path("/proc/self/fd").iterdir()))


# --- stages ---------------------------------------------------------------------------------------------------------


def stages(size: Size) -> Iterator[Figure]:
    """The same attempts staged and in one go, eight workers each, on an engine with eight slots."""
    with tempfile.TemporaryDirectory() as folder:
        staged, whole = Engine(WORKERS), Engine(WORKERS)
        took = asyncio.run(_seconds(_staged(Path(folder) / "staged", staged, size.waits, size.tasks)))
        unstaged = asyncio.run(_seconds(_unstaged(Path(folder) / "unstaged", whole, size.waits, size.tasks)))
    beside = f"unstaged {whole.share:.0%}"
    yield Figure("engine busy from the first run to the last", staged.share * 100, 90, "%", beside, least=True)
    lower = (size.tasks * 8 / WORKERS * size.waits.engine + size.waits.prepare + size.waits.evaluate) / unstaged
    beside = f"{took:.1f} s and {unstaged:.1f} s; no order could be below {lower:.2f}"
    yield Figure("wall time, staged", took / unstaged, 0.55, "x unstaged", beside)


async def _seconds(work: Coroutine[Any, Any, list[Outcome]]) -> float:
    began = time.monotonic()
    statuses = {row.status for row in await work}
    assert statuses == {Status.COMPLETED}, statuses
    return time.monotonic() - began


async def _staged(
    run: Path, engine: Engine, waits: Waits, groups: int, listener: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """The real runner."""
    options, todo = _options(run), tasks(groups)
    board = Board(attempts(todo, options.samples))
    board.listener = listener
    runner = Runner(
        options, todo, recipe=recipe(run), sandboxes=Rooms(engine, waits), interceptor=Counter(run), board=board,
        judge=lambda _: Judge(),
    )  # fmt: skip
    return await runner.run()


async def _unstaged(run: Path, engine: Engine, waits: Waits, groups: int) -> list[Outcome]:
    """The same stages of an attempt one after the other, by workers that take one attempt at a time."""
    options, harness = _options(run), recipe(run)
    house = House(
        options, harness, harness.way(), Found((), ""), image="", sandboxes=Rooms(engine, waits),
        interceptor=Counter(run), judge=lambda _: Judge(),
    )  # fmt: skip
    todo = iter(attempts(tasks(groups), options.samples))

    async def worker() -> list[Outcome]:
        return [await _whole(house, attempt) for attempt in todo]

    done = await asyncio.gather(*(worker() for _ in range(WORKERS)))
    return [outcome for some in done for outcome in some]


async def _whole(house: House, attempt: Attempt) -> Outcome:
    trial = Trial(house, attempt)
    await trial.prepare()
    status, note = await trial.run()
    await trial.judge()
    await trial.close(status)
    return trial.outcome(status, note)


def _options(run: Path) -> Options:
    pools = Pools(init=WORKERS, ready=2 * WORKERS, run=WORKERS, post=WORKERS)
    return Options(run, "simulated", "http://127.0.0.1:9", samples=8, sandbox="simulated", pools=pools)


# --- real -----------------------------------------------------------------------------------------------------------


def real(size: Size) -> Iterator[Figure]:
    """Pi in local sandboxes, a real interceptor, an engine that answers with words: CPU of all but the engine."""
    with tempfile.TemporaryDirectory() as folder, serving() as engine:
        own, others, began = time.process_time(), _children(), time.monotonic()
        rows = asyncio.run(_with_pi(Path(folder) / "run", f"http://127.0.0.1:{engine.port}", size.real))
        own, others, took = time.process_time() - own, _children() - others, time.monotonic() - began
    statuses = {row.status for row in rows}
    assert statuses == {Status.COMPLETED}, [row.note for row in rows]
    beside = f"at least {others / len(rows):.2f} s more of its children: Pi, bubblewrap, mitmdump"
    yield Figure("CPU of the runner, Pi in local sandboxes", own / len(rows), 1, "s an attempt", beside)
    yield Figure("wall time of it", took / len(rows), None, "s an attempt", f"{len(rows)} attempts in {took:.1f} s")


async def _with_pi(run: Path, engine: str, groups: int) -> list[Outcome]:
    options = Options(
        run, "pi", engine, tokenizer=str(fetch("qwen3-tokenizer")), sampling='{"max_new_tokens": 32}', samples=8
    )
    check = Check("command", {"command": "true"})
    todo = [Task(f"words-{number}", "Say some words.", check) for number in range(1, groups + 1)]
    runner = Runner(
        options, todo, recipe=find("pi"), sandboxes=sandboxes("local", run, "benchmark"),
        interceptor=Interceptor(run, options.settings()), board=Board(attempts(todo, options.samples)),
    )  # fmt: skip
    return await runner.run()


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- start ----------------------------------------------------------------------------------------------------------


def start(size: Size) -> Iterator[Figure]:
    """From `run` to the first instruction of the command, in a local sandbox that was prepared before."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = asyncio.run(_starts(Path(folder), size.starts))
    bare = [_took(["bwrap", "--unshare-all", "--dev-bind", "/", "/", *TIME]) for _ in range(size.starts)]
    plain = [_took(list(TIME)) for _ in range(size.starts)]
    beside = f"bwrap {_both(bare)}, fork and exec {_both(plain)} (p50, max)"
    yield Figure("start of a prepared attempt, p50", statistics.median(prepared), 100, "ms", beside)
    yield Figure(f"start of a prepared attempt, longest of {size.starts}", max(prepared), 100, "ms", beside)


async def _starts(folder: Path, count: int) -> list[float]:
    kind = sandboxes("local", folder, "benchmark")
    taken: list[float] = []
    for number in range(count):
        sandbox = await kind.create(Plan(f"s{number}", folder / f"s{number}", Environment()))
        try:
            taken.append(await _start(sandbox, folder / f"log{number}"))
        finally:
            await sandbox.close()
    await kind.close()
    return taken


async def _start(sandbox: Sandbox, log: Path) -> float:
    began = time.time()
    ended = await sandbox.run(Command(TIME), timeout_s=30, log=log)
    assert ended.status == 0, log.with_name(f"{log.name}.err").read_text()
    return (float(log.with_name(f"{log.name}.out").read_text()) - began) * 1e3


def _took(command: list[str]) -> float:
    began = time.time()
    return (float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout) - began) * 1e3


def _both(taken: list[float]) -> str:
    return f"{statistics.median(taken):.1f} and {max(taken):.1f} ms"


MEASURES = (many, stages, start, real)


def main() -> None:
    """Run the measures and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the measures whose names hold this word")
    parser.add_argument("--quick", action="store_true", help="everything tiny; the limits are those of the full run")
    given = parser.parse_args()
    size = QUICK if given.quick else Size()
    os.environ["PATH"] = os.pathsep.join([str(ROOT / ".harness" / "node_modules" / ".bin"), os.environ["PATH"]])
    CONSOLE.print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    chosen = [m for m in MEASURES if given.only in m.__name__]
    show("What a rollout costs", [(f"{m.__name__}: {m.__doc__}", functools.partial(m, size)) for m in chosen], CONSOLE)


if __name__ == "__main__":
    main()
