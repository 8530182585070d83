"""`kill -9` in the middle of a run: what was finished is readable, what was not is listed, the harness goes on."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest

from polar_mitm.journal import read_calls
from polar_toolkit.rollout.harnesses.scripted_engine import EngineCall, Fault
from tests.bench.interception import Done, interception
from tests.harness.performance import SESSION, TASK, Json, script

pytestmark = pytest.mark.harness


@dataclass(frozen=True, slots=True)
class Survived:
    """A run whose proxy was killed during the third call, and started again on the same folder and port."""

    engine: list[EngineCall]
    at_death: list[Json]
    """Rows as read before the restart."""
    rows: list[Json]
    done: Done


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Generator[Survived]:
    folder: Path = tmp_path_factory.mktemp("run")
    finished: list[Done] = []
    with interception(folder, script("pi", shell_calls=2)) as bench:
        bench.engine.faults += [None, None, Fault("hold", after=5)]
        with bench.proxy() as proxy:
            harness = threading.Thread(
                target=lambda: finished.append(bench.perform("pi", "openai", TASK, session=SESSION))
            )
            harness.start()
            assert bench.engine.holding.wait(60)
            proxy.kill()
        at_death = read_calls(bench.run).to_pylist()
        with bench.proxy(listen_port=str(proxy.port)):
            harness.join()
        yield Survived(bench.engine.calls, at_death, read_calls(bench.run).to_pylist(), finished[0])


def test_every_finished_call_is_readable(survived: Survived):
    """The two calls that were answered before the kill are there, to the bit, before any restart."""
    kept = [row for row in survived.at_death if row["status"] == "completed"]
    assert [row["output_ids"] for row in kept] == [c.output_ids.tolist() for c in survived.engine[:2]]
    assert [row["logprobs"] for row in kept] == [c.logprobs for c in survived.engine[:2]]


def test_the_unfinished_call_is_listed_as_lost(survived: Survived):
    """The call that died in the middle of its stream is a row that says so, and after the restart still is."""
    for rows in (survived.at_death, survived.rows):
        (lost,) = [row for row in rows if row["status"] == "lost"]
        assert (lost["trainable"], lost["untrainable_reason"]) == (False, "lost")
        assert lost["prompt_len"] == len(survived.engine[2].prompt_ids)


def test_the_harness_goes_on_after_the_restart(survived: Survived):
    """The harness's own retry finishes the task, as an exact child of a call that an earlier process recorded."""
    assert survived.done.status == 0, survived.done.output
    first_two = [row["call_id"] for row in survived.at_death if row["status"] == "completed"]
    (retried,) = [row for row in survived.rows if row["writer"] != survived.at_death[0]["writer"]]
    assert (retried["status"], retried["parent_call_id"]) == ("completed", first_two[1])
