"""What goes wrong with the engine is waited out or mended; the client sees one ordinary answer, the record one call."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest

from polar_toolkit.rollout.harnesses.scripted_engine import EngineCall, Fault
from tests.bench.interception import Interception, interception
from tests.harness.performance import Json, completed

pytestmark = pytest.mark.harness

CHAT = "https://api.openai.com/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
ANSWER = "one two three four five six seven eight"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Generator[Interception]:
    reply = f"<think>\n\n</think>\n\n{ANSWER}"
    with interception(tmp_path_factory.mktemp("run"), lambda _: reply) as made, made.proxy():
        yield made


def answered(bench: Interception, *faults: Fault) -> tuple[Json, list[EngineCall]]:
    """The row of one call that met these faults, and the engine's calls for it."""
    before = len(bench.engine.calls)
    bench.engine.faults += faults
    answer = bench.ask(CHAT, session="s1", body=HELLO)
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER
    return completed(bench.run)[-1], bench.engine.calls[before:]


def test_an_overloaded_engine_is_waited_for(bench: Interception):
    """Two answers of 503 cost the client nothing but time."""
    row, calls = answered(bench, Fault("overloaded"), Fault("overloaded"))
    assert row["output_ids"] == calls[-1].output_ids.tolist()
    assert row["trainable"]


def test_an_aborted_call_is_resumed_from_its_tokens(bench: Interception):
    """A call that a weight update cuts short goes on from its own tokens: one row, each token with its logprob."""
    row, (cut, rest) = answered(bench, Fault("abort", after=6))
    assert len(cut.output_ids) == 6
    assert np.array_equal(rest.prompt_ids, np.concatenate([cut.prompt_ids, cut.output_ids]))
    assert row["output_ids"] == [*cut.output_ids.tolist(), *rest.output_ids.tolist()]
    assert row["logprobs"] == [*cut.logprobs, *rest.logprobs]
    assert [(span["start"], span["end"]) for span in row["versions"]] == [(0, 6), (6, len(row["output_ids"]))]
