"""One generation over an engine that is cut short, down, or updated meanwhile. The engine is a list of attempts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from polar_mitm.engine import Description, Engine, Sample, Span
from polar_mitm.errors import EngineError, EngineUnavailable
from polar_mitm.generation import Generation

PROMPT = np.array([100, 101], np.int32)
STOP = {"type": "stop", "matched": 9}
ABORT = {"type": "abort", "message": "Aborted"}
DOWN = EngineUnavailable("connection refused")


def piece(*ids: int, finish: dict[str, Any] | None = None, versions: tuple[Span, ...] = (), cached: int = 0) -> Sample:
    return Sample(np.array(ids, np.int32), -np.array(ids, np.float32), finish, versions, cached)


def spans(*named: tuple[int, int, str]) -> tuple[Span, ...]:
    return tuple(Span(*span) for span in named)


@dataclass
class Played:
    """An engine that plays attempts, each a list of pieces that may end in an error."""

    attempts: list[Sequence[Sample | Exception]]
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    sampling: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    rids: list[str] = field(default_factory=list[str])
    aborted: list[str] = field(default_factory=list[str])

    async def generate(self, prompt: np.ndarray, sampling: dict[str, Any], rid: str) -> AsyncGenerator[Sample]:
        self.prompts.append(prompt.tolist())
        self.sampling.append(sampling)
        self.rids.append(rid)
        for item in self.attempts.pop(0) if len(self.attempts) > 1 else self.attempts[0]:
            if isinstance(item, Exception):
                raise item
            yield item

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def describe(self) -> Description:
        return Description("played", 1000, "v1")

    async def check_tokenizer(self, ids: Sequence[int], vocabulary: int) -> None:
        """Anything goes."""


def generate(*attempts: Sequence[Sample | Exception], wait: float = 0.5, **applied: Any) -> tuple[Played, Generation]:
    """Run a generation to its end."""
    played = Played(list(attempts))
    engine: Engine = played
    generation = Generation(engine, PROMPT, {"max_new_tokens": 10, "temperature": 1.0} | applied, wait)

    async def run() -> None:
        async with aclosing(generation.pieces()) as pieces:
            async for _ in pieces:
                pass

    asyncio.run(run())
    return played, generation


def test_a_generation_keeps_every_id_with_its_logprob() -> None:
    """In the order in which they were drawn, as int32 and float32."""
    _, generation = generate([piece(1, 2, cached=2), piece(3, finish=STOP, versions=spans((0, 3, "v1")))])
    columns = generation.columns()
    assert columns["output_ids"].tolist() == [1, 2, 3]
    assert columns["logprobs"].tolist() == [-1, -2, -3]
    assert (columns["output_ids"].dtype, columns["logprobs"].dtype) == (np.int32, np.float32)
    assert columns["versions"] == [{"start": 0, "end": 3, "version": "v1"}]
    assert columns["cached_tokens"] == 2
    assert columns["first_token_ns"] <= time.time_ns()


def test_a_generation_that_never_began_has_empty_columns() -> None:
    """Nothing sampled, nothing claimed."""
    columns = Generation(Played([[]]), PROMPT, {"max_new_tokens": 10}, 1).columns()
    assert len(columns["output_ids"]) == len(columns["logprobs"]) == 0
    assert columns["first_token_ns"] is None
    assert columns["engine_finish"] is None


CUT = (
    [piece(1, 2), piece(3, finish=ABORT, versions=spans((0, 3, "v1")))],
    [piece(4), piece(5, finish=STOP, versions=spans((0, 2, "v2")))],
)


def test_an_abort_by_a_weight_update_is_gone_on_from() -> None:
    """The second attempt's prompt is the first one's with what was sampled; every id is kept once."""
    played, generation = generate(*CUT)
    assert played.prompts == [[100, 101], [100, 101, 1, 2, 3]]
    assert generation.columns()["output_ids"].tolist() == [1, 2, 3, 4, 5]
    assert generation.columns()["logprobs"].tolist() == [-1, -2, -3, -4, -5]


def test_the_budget_of_an_attempt_is_what_the_ones_before_left() -> None:
    """max_new_tokens bounds the whole output."""
    played, generation = generate(*CUT)
    assert [s["max_new_tokens"] for s in played.sampling] == [10, 7]
    assert generation.applied["max_new_tokens"] == 10


def test_the_versions_of_an_attempt_are_shifted_behind_the_ones_before() -> None:
    """Spans cover the output without a gap, and each token has the weights that drew it."""
    assert generate(*CUT)[1].columns()["versions"] == [
        {"start": 0, "end": 3, "version": "v1"},
        {"start": 3, "end": 5, "version": "v2"},
    ]


def test_two_attempts_by_two_versions_do_not_mix_their_caches() -> None:
    """Each attempt was computed by one version from its first token on."""
    assert not generate(*CUT)[1].mixed_kv


def test_one_attempt_by_two_versions_has_a_mixed_cache() -> None:
    """Its later tokens stand on keys and values of the older weights."""
    _, generation = generate([piece(1, 2, finish=STOP, versions=spans((0, 1, "v1"), (1, 2, "v2")))])
    assert generation.mixed_kv


def test_every_attempt_has_an_id_of_its_own() -> None:
    """SGLang aborts by prefix of the id: ids are never used twice."""
    played, _ = generate(*CUT)
    assert len(set(played.rids)) == 2
    assert {len(rid) for rid in played.rids} == {32}


def test_a_stream_that_broke_is_gone_on_from() -> None:
    """What was read before the engine died is kept, with its version."""
    played, generation = generate(
        [piece(1, 2, versions=spans((0, 2, "v1"))), EngineUnavailable("cut")],
        [piece(3, finish=STOP, versions=spans((0, 1, "v2")))],
    )
    assert played.prompts[1] == [100, 101, 1, 2]
    assert [(v["start"], v["end"]) for v in generation.columns()["versions"]] == [(0, 2), (2, 3)]
    assert played.aborted == played.rids[:1]


def test_a_call_under_a_grammar_is_not_gone_on_from() -> None:
    """The grammar's state is lost with the attempt: the call fails, with its tokens."""
    with pytest.raises(EngineError, match="aborted"):
        generate(*CUT, json_schema="{}")


def test_a_call_under_a_grammar_that_sampled_nothing_begins_again() -> None:
    """Nothing was lost."""
    _, generation = generate([DOWN], [piece(1, finish=STOP)], json_schema="{}")
    assert generation.output_ids.tolist() == [1]


def test_an_engine_that_comes_up_is_waited_for() -> None:
    """The harness sees nothing of it."""
    played, generation = generate([DOWN], [DOWN], [piece(1, finish=STOP)])
    assert len(played.prompts) == 3
    assert generation.output_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        pytest.param([DOWN], EngineUnavailable, id="an engine that stays down"),
        pytest.param([piece(finish=ABORT)], EngineError, id="an engine that aborts every attempt"),
    ],
)
def test_waiting_ends_after_the_time_that_the_run_gives(attempt: list[Sample | Exception], error: type) -> None:
    """`polar_wait` bounds it, and the engine's own words are the error."""
    began = time.monotonic()
    with pytest.raises(error):
        generate(attempt, wait=0.2)
    assert time.monotonic() - began < 2


def test_an_error_of_the_engine_is_not_tried_again() -> None:
    """Only what passes by itself is waited for."""
    played = Played([[EngineError("bad value")]])
    with pytest.raises(EngineError, match="bad value"):
        asyncio.run(anext(Generation(played, PROMPT, {"max_new_tokens": 10}, 5).pieces()))
    assert len(played.prompts) == 1


def test_who_stops_reading_aborts_the_engine() -> None:
    """The attempt that was being read is aborted by its id, and nothing else is asked."""
    played = Played([[piece(1), piece(2), piece(3, finish=STOP)]])
    generation = Generation(played, PROMPT, {"max_new_tokens": 10}, 5)

    async def first() -> None:
        async with aclosing(generation.pieces()) as pieces:
            await anext(pieces)

    asyncio.run(first())
    assert played.aborted == played.rids
    assert len(played.rids) == 1
    assert generation.output_ids.tolist() == [1]


def test_an_answer_that_ended_is_not_aborted() -> None:
    """Nothing is left to stop."""
    played, _ = generate([piece(1, finish=STOP)])
    assert played.aborted == []
