"""The matrix: every harness and provider, through proxy variables and through transparent interception.

The cells run two at a time, since a harness spends much of its time waiting; each test judges one of them. At the end a
table shows them all, and another what the same calls come to with other ways of recording and merging (baselines.py).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from polar_toolkit.merge import Options, account
from polar_toolkit.tree import TRAINED_KINDS
from tests.bench.interception import Done, interception
from tests.bench.netns import Attempt
from tests.harness.baselines import Comparison, compare, total
from tests.harness.cells import Cell, cells
from tests.harness.performance import CLOSING, GREETING, Json, completed

AT_ONCE = 2
COLUMNS = (
    "harness", "version", "dialect", "mode", "calls", "kinds", "edges", "sampled tokens", "trained share", "seconds",
)  # fmt: skip
COMPARED = (
    "harness", "mode", "sampled", "exact edges", "trained", "out of context", "twice", "rows",
    "prompts read back", "re-render keeps", "splice: trained", "out of context", "rows",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A cell and how its calls come to the interceptor."""

    cell: Cell
    way: str

    @property
    def name(self) -> str:
        """Names the test."""
        return f"{self.cell.name}-{self.way}"


@dataclass(frozen=True, slots=True)
class Played:
    """What a case left behind."""

    done: Done
    rows: list[Json]
    report: Json
    compared: Comparison
    """The same calls, merged by us and by others."""
    attempts: list[Attempt]
    log: str
    """What mitmdump printed."""
    gateway: str
    """host:port of the gateway, the only place that the interceptor connects to."""
    seconds: float
    """From the start of the harness to its end."""


Playing = Mapping[str, Future[Played]]
CASES = [Case(cell, way) for cell in cells() for way in cell.ways]
PARAMETERS = [
    pytest.param(case, id=case.name, marks=[] if case.cell.quick and case.way == "transparent" else [pytest.mark.slow])
    for case in CASES
]
pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def playing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Playing]:
    """All cases that this run of pytest asks for, under way from now on."""
    folder = tmp_path_factory.mktemp("matrix")
    chosen = [item.callspec.params["case"] for item in request.session.items if item.path == request.path]
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        futures = {case.name: pool.submit(play, folder / case.name, case) for case in chosen}
        yield futures
        capture = request.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            Console(width=200).print(table(chosen, futures), comparison(chosen, futures))
    finally:
        pool.shutdown(cancel_futures=True)


def play(folder: Path, case: Case) -> Played:
    """Run one case on a machine of its own."""
    folder.mkdir()
    with interception(folder, case.cell.act) as bench:
        with bench.transparent_proxy() if case.way == "transparent" else bench.proxy() as proxy:
            began = time.monotonic()
            done = case.cell.run(bench)
            seconds = time.monotonic() - began
            gateway: str = json.loads((bench.run / "proxy.json").read_text())["gateway"]
        attempts = bench.namespace.attempts()
        rows = completed(bench.run)
        report = account(bench.run, Options(workers=1), lambda *_: None)[1] if rows else {}
        compared = compare(bench.run) if rows else Comparison()
        at = gateway.removeprefix("http://")
        return Played(done, rows, report, compared, attempts, proxy.log.read_text(), at, seconds)


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_cell_of_the_matrix(case: Case, playing: Playing):
    """The task is done, every call is on record and of the right kind, what was sampled trains, no packet left."""
    played = playing[case.name].result()
    assert _complaints(case.cell, played) == [], f"{played.done.output}\n{played.log}"


def _complaints(cell: Cell, played: Played) -> list[str]:
    """What is wrong with a case, one sentence each."""
    kinds = Counter(row["kind"] for row in played.rows)
    trained = sum(len(row["output_ids"]) for row in played.rows if row["kind"] in TRAINED_KINDS)
    written = played.done.workspace / "hello.txt"
    errors = [line for line in played.log.splitlines() if "Traceback" in line or "rror" in line]
    compared, ours = played.compared, played.compared.ours
    reached = {line.split("server connect ")[1] for line in played.log.splitlines() if "server connect " in line}
    checks = {
        f"ended with status {played.done.status}": played.done.status != 0,
        "hello.txt is missing or wrong": not written.exists() or written.read_text() != GREETING,
        "the closing words were not shown": CLOSING not in played.done.output,
        f"a packet was on its way out: {played.attempts}": bool(played.attempts),
        f"the interceptor connected to {reached}": reached != {played.gateway},
        f"the interceptor complains: {errors}": bool(errors),
        f"kinds are {dict(kinds)}, not {dict(cell.kinds)}": not _enough(kinds, cell.kinds),
        f"dialects are {_all(played, 'dialect')}": _all(played, "dialect") != {cell.dialect},
        f"edges are {_edges(played)}": played.report.get("edges", {}).get("exact", -1) < cell.exact,
        f"of {trained} tokens to train, {_trained(played)} are trained": _trained(played) != trained or not trained,
        f"of {compared.continuing} later calls, {compared.exact} are attached exactly": cell.append_only
        and compared.exact != compared.continuing,
        f"the parent of the last call is shown by {_last_evidence(played)}": cell.text_turn is not None
        and _last_evidence(played) != cell.text_turn,
        f"of {compared.prompts} prompts, {compared.faithful} say what was asked": compared.faithful != compared.prompts,
        "no later call forks": not cell.append_only and _agent_roots(played) < 2,
        f"roots with a history have the windows {_windows(played)}": None in _windows(played),
        f"{ours.out_of_context} tokens stand where they were not sampled": ours.out_of_context > 0,
        f"{ours.twice} tokens are trained twice": ours.twice > 0,
        f"the baselines' judge finds {ours.trained} trained tokens": ours.trained != trained,
        "an answer was not delivered": _all(played, "client_delivered") != {True},
    }
    return [sentence for sentence, wrong in checks.items() if wrong]


def _enough(kinds: Mapping[str, int], wanted: Mapping[str, int]) -> bool:
    return kinds.keys() == wanted.keys() and all(kinds[kind] >= count for kind, count in wanted.items())


def _all(played: Played, column: str) -> set[object]:
    return {row[column] for row in played.rows}


def _last_evidence(played: Played) -> str | None:
    agents = [row for row in played.rows if row["kind"] == "agent"]
    return agents[-1]["parent_evidence"] if agents else None


def _agent_roots(played: Played) -> int:
    return sum(row["kind"] == "agent" and row["parent_call_id"] is None for row in played.rows)


def _forks(played: Played) -> list[Json]:
    return [row for row in played.rows if row["root_reason"] not in (None, "first", "subagent")]


def _windows(played: Played) -> list[str | None]:
    """How each root with a history leaves the nearest earlier call."""
    windows = [row["root_window"] for row in _forks(played)]
    return [json.loads(window)["class"] if window else None for window in windows]


def _trained(played: Played) -> int:
    return played.report.get("tokens", {}).get("trained", 0)


def _edges(played: Played) -> str:
    return ", ".join(f"{edge} {count}" for edge, count in played.report.get("edges", {}).items() if count)


def table(cases: list[Case], futures: Playing) -> Table:
    """What the cases came to, one line each."""
    shown = Table(title="Harness matrix")
    for column in COLUMNS:
        shown.add_column(column, justify="right" if column in COLUMNS[-3:] else "left")
    for case in cases:
        shown.add_row(case.cell.name, case.cell.version, case.cell.dialect, case.way, *_figures(case, futures))
    return shown


def _figures(case: Case, futures: Playing) -> list[str]:
    future = futures[case.name]
    played = _finished(future)
    if played is None:
        return ["-", f"[red]did not run: {future.exception() if future.done() else 'stopped'}"]
    kinds = Counter(row["kind"] for row in played.rows)
    tokens = played.report.get("tokens", {"sampled": 0, "share": 0.0})
    return [
        str(len(played.rows)),
        ", ".join(f"{kind} {count}" for kind, count in kinds.items()),
        "; ".join([_edges(played), *(f"left: {window}" for window in _windows(played))])
        + ("" if not _complaints(case.cell, played) else " [red]FAILED"),
        str(tokens["sampled"]),
        f"{tokens['share']:.1%}",
        f"{played.seconds:.1f}",
    ]


def comparison(cases: list[Case], futures: Playing) -> Table:
    """What our way and others make of the same calls, one line a case, and all of them together."""
    shown = Table(
        title="The same calls, merged: ours, a plain re-render, and prefix merging (Polar) of plain re-renders"
    )
    for column in COMPARED:
        shown.add_column(column, justify="left" if column in COMPARED[:2] else "right")
    done = [(case, played) for case in cases if (played := _finished(futures[case.name]))]
    for case, played in done:
        shown.add_row(case.cell.name, case.way, *_compared(played.compared))
    shown.add_section()
    append_only = (played.compared for case, played in done if case.cell.append_only)
    shown.add_row("append-only harnesses", "", *_compared(total(append_only)))
    shown.add_row("all", "", *_compared(total(played.compared for _, played in done)))
    return shown


def _compared(found: Comparison) -> list[str]:
    ours, spliced = found.ours, found.spliced
    return [
        str(ours.sampled),
        f"{found.exact} of {found.continuing}",
        _share(ours.trained, ours.sampled),
        str(ours.out_of_context),
        str(ours.twice),
        f"{ours.rows / max(1, ours.sessions):.2f}",
        f"{found.faithful} of {found.prompts}",
        _share(found.kept, found.continued),
        _share(spliced.trained, spliced.sampled),
        f"{spliced.out_of_context} ({_share(spliced.out_of_context, spliced.trained)})",
        f"{spliced.rows / max(1, spliced.sessions):.2f}",
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _finished(future: Future[Played]) -> Played | None:
    return None if not future.done() or future.cancelled() or future.exception() else future.result()
