"""Every harness finishes a task of two turns through mitmdump, and its calls merge into one faithful trajectory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from tests.bench.interception import Done, interception
from tests.bench.netns import Attempt
from tests.harness.performance import CLOSING, GREETING, PERFORMERS, SESSION, TASK, Json, completed, output, script

pytestmark = pytest.mark.harness


@dataclass(frozen=True, slots=True)
class Played:
    """What a harness's performance left behind."""

    done: Done
    engine: ScriptedEngine
    rows: list[Json]
    trajectories: list[Json]
    report: Json
    printed: str
    """What the merge printed."""
    log: str
    """What mitmdump printed."""
    attempts: list[Attempt]


@pytest.fixture(scope="module", params=PERFORMERS, ids="-".join)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("run"), *request.param)


def play(folder: Path, harness: str, provider: str) -> Played:
    with interception(folder, script(harness)) as bench:
        with bench.proxy() as proxy:
            done = bench.perform(harness, provider, TASK, session=SESSION)
        attempts = bench.namespace.attempts()
        assert len(bench.engine.calls) == 2, f"{len(bench.engine.calls)} engine calls; the harness said:\n{done.output}"
        printed = bench.toolkit("merge", str(bench.run))
        trajectories = pq.read_table(bench.run / "merged" / "trajectories").to_pylist()
        report = json.loads((bench.run / "merged" / "report.json").read_text())
        return Played(
            done, bench.engine, completed(bench.run), trajectories, report, printed, proxy.log.read_text(), attempts
        )


def test_the_harness_finishes_its_task(played: Played):
    """The tool call ran, its file is there, and the harness ended well with the last reply."""
    assert played.done.status == 0, played.done.output
    assert (played.done.workspace / "hello.txt").read_text() == GREETING
    assert CLOSING in played.done.output


def test_nothing_tried_to_leave(played: Played):
    """Neither the harness nor the proxy tried to reach another machine, or looked a name up."""
    assert played.attempts == []


def test_the_proxy_has_nothing_to_complain_about(played: Played):
    """Not a single traceback or error in mitmdump's output, from the start to the end."""
    assert not [line for line in played.log.splitlines() if "Traceback" in line or "rror" in line]


def test_the_second_prompt_begins_with_what_was_sampled(played: Played):
    """The engine's second prompt is the first one, the very tokens it played, and then the tool's output."""
    first, second = played.engine.calls
    tip = np.concatenate([first.prompt_ids, first.output_ids])
    assert np.array_equal(second.prompt_ids[: len(tip)], tip)
    assert output(0) in played.engine.decode(second.prompt_ids[len(tip) :])


def test_the_rows_hold_exactly_what_the_engine_played(played: Played):
    """Every sampled id and logprob is on record, bit for bit, as one completed and delivered call each."""
    assert [row["session_id"] for row in played.rows] == [SESSION, SESSION]
    assert [row["client_delivered"] for row in played.rows] == [True, True]
    assert [row["output_ids"] for row in played.rows] == [c.output_ids.tolist() for c in played.engine.calls]
    assert [row["logprobs"] for row in played.rows] == [c.logprobs for c in played.engine.calls]


def test_the_second_call_is_an_exact_child_of_the_first(played: Played):
    """The parent is named, by an id that the harness echoed, and the edge is exact."""
    first, second = played.rows
    assert (second["parent_call_id"], second["parent_evidence"]) == (first["call_id"], "pointer")
    assert first["root_reason"] == "first"
    assert played.report["edges"]["exact"] == 1


def test_one_trajectory_trains_every_sampled_token_once(played: Played):
    """The session is one trajectory whose mask covers exactly the played tokens, each with its own logprob."""
    (trajectory,) = played.trajectories
    calls = played.engine.calls
    mask = np.array(trajectory["loss_mask"], bool)
    assert trajectory["input_ids"] == [*calls[1].prompt_ids.tolist(), *calls[1].output_ids.tolist()]
    assert np.array(trajectory["input_ids"])[mask].tolist() == [i for c in calls for i in c.output_ids.tolist()]
    assert np.array(trajectory["logprobs"])[mask].tolist() == [logprob for c in calls for logprob in c.logprobs]
    assert played.report["tokens"]["share"] == 1


def test_the_rerender_baseline_stands_beside_it(played: Played):
    """The merge says how much of this a plain re-render of the harness's history would have kept."""
    assert played.report["rerender"]["edges"] == 1
    assert "re-render baseline" in played.printed
