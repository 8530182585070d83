"""What merging costs and what it keeps: this project's and the mergers of others on the same sessions; then from disk.

Prints, for each scenario, CPU milliseconds of reading Parquet, of making the merger's own input, and of merging, the
best of several rounds; and what became of the sampled tokens, judged by code of its own against the known truth. Then
the figures with their limits. `--only WORD` runs the measures whose names hold a word; `--quick` makes everything tiny,
where the limits mean nothing. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.peers.__main__ import CONTESTANTS
from benchmarks.stage.clock import fastest
from benchmarks.stage.engine import words
from benchmarks.stage.figures import Figure, show
from benchmarks.stage.grading import Marks, Row, grade
from benchmarks.stage.load import Client
from benchmarks.stage.processes import ROOT, engine, interceptor
from benchmarks.stage.resident import Used, watched
from benchmarks.stage.scenarios import SCENARIOS, Scenario, Size, write
from benchmarks.stage.sessions import FIRST, OBSERVED, SAMPLED, write_run
from polar_mitm.rows import full_prompts
from polar_toolkit import calls
from polar_toolkit.calls import Call
from polar_toolkit.rewards import FILE as REWARDS
from polar_toolkit.trajectories import Trajectory, build
from polar_toolkit.tree import grow
from polar_train.small_models import fetch

OURS = tuple(name for name in CONTESTANTS if name.startswith("ours"))
PEERS = tuple(name for name in CONTESTANTS if name not in OURS)
CONSOLE = Console(width=None if sys.stdout.isatty() else 150)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    turns: int = 100
    size: Size = field(default_factory=Size)
    rounds: int = 5
    whole_turns: tuple[int, ...] = (50, 100, 200, 400)
    linked_turns: tuple[int, ...] = (50, 100, 200, 400, 800, 1_600, 3_200)
    sessions: int = 1_000
    recorded: int = 4
    """Sessions that go through a real interceptor."""


QUICK = Plan(20, Size(800, 25, 50), 2, (5, 10, 20), (5, 10, 20, 40), 10, 1)


# --- against others -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """One merger on one scenario; milliseconds of CPU."""

    name: str
    read: float
    convert: float
    merge: float
    marks: Marks


def mergers(plan: Plan) -> Iterator[Figure]:
    """All mergers on all scenarios, one after the other."""
    scenarios = [(label, make(plan.turns, plan.size)) for label, make in SCENARIOS]
    results: list[list[Result]] = [[] for _ in scenarios]
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / str(i) for i in range(len(scenarios))]
        for (_, scenario), where in zip(scenarios, folders, strict=True):
            write(scenario, where)
        for name in CONTESTANTS:
            for i, timed in enumerate(_contest(name, plan.rounds, folders)):
                results[i].append(
                    Result(name, **timed, marks=grade(scenarios[i][1], _rows(folders[i] / f"{name}.npz")))
                )
    for (label, scenario), some in zip(scenarios, results, strict=True):
        CONSOLE.print(_table(label, scenario, some))
    yield from _verdicts([scenario for _, scenario in scenarios], results)


def _contest(name: str, rounds: int, folders: Sequence[Path]) -> Iterator[dict[str, float]]:
    """The times of one merger, in a process of its own; nothing, and a line that says so, when it is not installed."""
    command = [sys.executable, "-m", "benchmarks.peers", name, str(rounds), *map(str, folders)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / ".peers"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    head, *lines = map(json.loads, done.stdout.splitlines())
    if "missing" in head:
        CONSOLE.print(f"[red]{name} is not measured:[/] {head['missing']}")
        return
    CONSOLE.print(f"{name}: {head['package']} {head['version']}, from {head['native']}: {head['note']}", soft_wrap=True)
    yield from lines


def _rows(path: Path) -> list[Row]:
    with np.load(path) as stored:
        return [Row(*(stored[f"{kind}{i}"] for kind in ("ids", "mask", "logprobs"))) for i in range(len(stored) // 3)]


def _table(label: str, scenario: Scenario, results: Sequence[Result]) -> Table:
    title = f"{label}: {len(scenario.turns)} calls, {scenario.tokens_in:,} tokens in, {scenario.wanted:,} to train"
    columns = (
        "read ms",
        "convert ms",
        "merge ms",
        "x fastest peer",
        "samples",
        "kept",
        "twice",
        "wrong",
        "orphans",
        "",
    )
    table = Table("merger", *columns, title=title)
    fastest = _fastest(results)
    for one in results:
        times = (f"{one.read:.1f}", f"{one.convert:.1f}", f"{one.merge:.2f}", f"{fastest / one.merge:.2f}")
        marks = one.marks
        counts = map(str, (marks.samples, marks.kept, marks.twice, marks.wrong, marks.orphans))
        table.add_row(one.name, *times, *counts, "full" if marks.full(scenario) else "")
    return table


def _fastest(results: Sequence[Result]) -> float:
    return min((one.merge for one in results if one.name not in OURS), default=float("nan"))


def _verdicts(scenarios: Sequence[Scenario], results: Sequence[Sequence[Result]]) -> Iterator[Figure]:
    full = {name: _full(name, scenarios, results) for name in CONTESTANTS}
    for name in OURS:
        yield Figure(
            f"{name}: scenarios with full marks", full[name], len(scenarios), f"of {len(scenarios)}", least=True
        )
    best = max(PEERS, key=lambda name: full[name])
    yield Figure(
        "most scenarios with full marks of a peer", full[best], len(scenarios) - 1, f"of {len(scenarios)}", best
    )
    measured = {one.name for one in results[0]}
    yield Figure("peers that could not be measured", len(set(PEERS) - measured), 0, "peers")
    fastest = _fastest(results[0])
    for one in results[0]:
        if one.name in OURS:
            against = f"{fastest:.1f} ms against {one.merge:.2f}"
            yield Figure(f"{one.name}: linear session", fastest / one.merge, 10, "x fastest peer", against, least=True)


def _full(name: str, scenarios: Sequence[Scenario], results: Sequence[Sequence[Result]]) -> int:
    pairs = zip(scenarios, results, strict=True)
    return sum(one.marks.full(scenario) for scenario, some in pairs for one in some if one.name == name)


# --- time and input -------------------------------------------------------------------------------------------------


def growth(plan: Plan) -> Iterator[Figure]:
    """One session of more and more turns, in both forms."""
    yield from _growth("full prompts", plan.whole_turns, plan.rounds, whole=True)
    yield from _growth("parent + suffix", plan.linked_turns, plan.rounds, whole=False)


def _growth(form: str, turns: Sequence[int], rounds: int, *, whole: bool) -> Iterator[Figure]:
    sizes, times = list[int](), list[float]()
    for count in turns:
        session = _session(count, whole=whole)
        sizes.append(sum(len(call.prompt_suffix) + len(call.output_ids) for call in session))
        times.append(fastest(functools.partial(_merged, session), rounds)[0])
        note = f"{times[-1] / sizes[-1] * 1e6:.2f} ns a token of {sizes[-1]:,}"
        yield Figure(f"{form}, {count} turns", times[-1], None, "ms", note)
    exponent = float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
    yield Figure(f"{form}: time grows as input to the power of", exponent, 1.1, "")


def _merged(session: list[Call]) -> list[Trajectory]:
    return build(grow(session))


def _session(turns: int, *, whole: bool) -> list[Call]:
    """One session's calls, as recorded or as an import has them."""
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run", sessions=1, turns=turns)
        recorded = calls.read(run)
        if not whole:
            return recorded
        prompts = full_prompts(calls.table(run))
    unlinked = {"parent": None, "prompt_shared": 0, "prompt_hash": None, "evidence": None}
    return [replace(call, **unlinked, prompt_suffix=prompts[call.key]) for call in recorded]


# --- from disk ------------------------------------------------------------------------------------------------------


def disk(plan: Plan) -> Iterator[Figure]:
    """`polar-toolkit merge` of a run of many long sessions, from Parquet to Parquet; then a batch of their heads."""
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "run", sessions=plan.sessions, turns=plan.turns)
        stored = _bytes(run / "calls")
        scores = (run / REWARDS).rename(Path(folder) / REWARDS)  # without rewards no batch is made
        merged = _toolkit("merge", run)
        report = json.loads((run / "merged" / "report.json").read_text())
        scores.rename(run / REWARDS)
        packed = _toolkit("batch", run)
    trained, sampled = report["tokens"]["trained"], report["tokens"]["sampled"]
    tokens = plan.sessions * (FIRST - OBSERVED + plan.turns * (OBSERVED + SAMPLED))
    run_of = f"{plan.sessions:,} sessions x {plan.turns} turns"
    note = f"{merged.cpu:.1f} s of CPU, {tokens / merged.seconds / 1e6:.1f} M tokens/s"
    yield Figure(f"merge from disk, {run_of}", merged.seconds, 20, "s", note)
    yield Figure(f"merge from disk, {run_of}: peak memory", merged.peak, 1_536, "MB", "all its processes together")
    yield Figure("merge from disk: sampled tokens trained", trained / sampled, 1, "of all", least=True)
    yield Figure("then a batch of rows of 8,192 tokens", packed.seconds, None, "s", f"{packed.cpu:.1f} s of CPU")
    yield Figure("then a batch: peak memory", packed.peak, None, "MB", "all its processes together")
    yield Figure("calls on disk, ids and logprobs alone", stored / sampled, None, "bytes a sampled token")


def _toolkit(command: str, run: Path) -> Used:
    return watched([str(Path(sys.executable).parent / "polar-toolkit"), command, str(run)])


def bodies(plan: Plan) -> Iterator[Figure]:
    """What real sessions through a real interceptor leave on disk, raw bodies included, against the bodies sent."""
    with tempfile.TemporaryDirectory() as folder, engine(varied=True) as talking:
        with interceptor(Path(folder), talking) as proxy:
            sent = asyncio.run(_sessions(proxy, plan))
        run = Path(folder) / "run"
        stored, recorded = _bytes(run / "calls"), calls.read(run)
    sampled = sum(len(call.output_ids) for call in recorded)
    assert len(recorded) == plan.recorded * plan.turns, "the interceptor did not record every call"
    yield Figure("calls on disk", stored / sent, 0.1, "x raw request bodies", f"{sent / 1e6:.1f} MB of bodies")
    yield Figure("calls on disk", stored / sampled, None, "bytes a sampled token", f"{sampled:,} sampled tokens")


async def _sessions(proxy: Any, plan: Plan) -> int:  # Any: a Process of the stage
    sent = await asyncio.gather(*(_talk(proxy, plan, number) for number in range(plan.recorded)))
    return sum(sent)


async def _talk(proxy: Any, plan: Plan, number: int) -> int:  # Any: a Process of the stage
    """A session of Chat requests that grow as a harness's do; returns the bytes of its bodies."""
    client, rng, sent = await Client.through(proxy), random.Random(number), 0
    instructions = f"Session {number}. {_text(rng, plan.size.first)}"
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": "Mend the tests."}]
    for _ in range(plan.turns):
        body = {"model": "any", "max_tokens": plan.size.sampled, "messages": messages}
        sent += len(json.dumps(body).encode())
        answer = json.loads((await client.post("/v1/chat/completions", body)).body)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": _text(rng, plan.size.observed)})
    client.close()
    return sent


@functools.cache
def _vocabulary() -> list[str]:
    return [word for word, _ in words(Tokenizer.from_file(str(fetch("qwen3-tokenizer") / "tokenizer.json")))]


def _text(rng: random.Random, tokens: int) -> str:
    """Random words, about one token each."""
    return " ".join(rng.choices(_vocabulary(), k=tokens))


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


MEASURES = (mergers, growth, disk, bodies)


def main() -> None:
    """Run the measures and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the measures whose names hold this word")
    parser.add_argument("--quick", action="store_true", help="everything tiny; the limits are those of the full run")
    given = parser.parse_args()
    plan = QUICK if given.quick else Plan()
    CONSOLE.print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    chosen = [m for m in MEASURES if given.only in m.__name__]
    show("What merging costs", [(f"{m.__name__}: {m.__doc__}", functools.partial(m, plan)) for m in chosen], CONSOLE)


if __name__ == "__main__":
    main()
