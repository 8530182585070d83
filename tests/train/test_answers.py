"""From events to SGLang's JSON."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from polar_train.answers import Output, Shape, Stops
from polar_train.sampling import Params
from polar_train.scheduler import Finished, Prefilled, Token


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def output(tokenizer, *, shape: Shape | None = None, start: int | None = None, **sampling) -> Output:
    return Output(
        rid="r", prompt=np.array([1, 2, 3], np.int32), params=Params(**sampling), shape=shape or Shape(),
        logprob_start=start, tokenizer=tokenizer, version="v0",
    )  # fmt: skip


def tell(output: Output, text: str, *versions: str) -> None:
    """One token for each byte of a text."""
    ids = output.tokenizer.encode(text)
    for id, version in zip(ids, versions or ["v1"] * len(ids), strict=True):
        output.hear(Token(id, -0.5, version))


def test_a_stop_token_is_cut_from_the_text_unless_told_otherwise(tokenizer):
    """no_stop_trim keeps it, and skip_special_tokens would still hide it."""
    for sampling, text in [
        ({}, "hi"),
        ({"no_stop_trim": True, "skip_special_tokens": False}, "hi<end>"),
        ({"no_stop_trim": True}, "hi"),
        ({"skip_special_tokens": False}, "hi"),
    ]:
        told = output(tokenizer, **sampling)
        tell(told, "hi<end>")
        told.hear(Finished({"type": "stop", "matched": tokenizer.eos_token_id}))
        assert told.answer()["text"] == text
        assert told.answer()["output_ids"][-1] == tokenizer.eos_token_id


def test_a_stop_string_is_cut_from_the_text_only(tokenizer):
    """The ids keep what was sampled."""
    told = output(tokenizer, stop=("STOP",))
    tell(told, "go STOP")
    told.hear(Finished({"type": "stop", "matched": "STOP"}))
    assert (told.answer()["text"], len(told.answer()["output_ids"])) == ("go ", 7)


def test_half_a_character_waits_for_its_other_half(tokenizer):
    """While more may come the text never ends with a replacement character."""
    told = output(tokenizer)
    first, second = tokenizer.encode("é")
    told.hear(Token(first, -1.0, "v1"))
    assert told.answer()["text"] == ""
    told.hear(Token(second, -1.0, "v1"))
    assert told.answer()["text"] == "é"


def test_spans_list_who_sampled_what(tokenizer):
    """Neighbouring tokens of one version are one span."""
    told = output(tokenizer)
    tell(told, "abcd", "v1", "v1", "v2", "v2")
    told.hear(Finished({"type": "length", "length": 4}))
    meta = told.answer()["meta_info"]
    assert meta["weight_versions"] == [
        {"version": "v1", "start": 0, "end": 2},
        {"version": "v2", "start": 2, "end": 4},
    ]
    assert meta["weight_version"] == "v2"


def test_incremental_answers_carry_what_is_new(tokenizer):
    """Ids, text and logprobs are deltas, counts stay cumulative."""
    told = output(tokenizer, shape=Shape(logprobs=True, incremental=True))
    tell(told, "ab")
    assert told.answer()["text"] == "ab"
    tell(told, "c")
    answer = told.answer()
    assert (answer["text"], answer["output_ids"]) == ("c", tokenizer.encode("c"))
    assert len(answer["meta_info"]["output_token_logprobs"]) == 1
    assert answer["meta_info"]["completion_tokens"] == answer["meta_info"]["output_token_logprobs_length"] == 3


def test_a_stream_interval_holds_answers_back_until_the_end(tokenizer):
    """Between intervals there is nothing worth sending; the end always is."""
    told = output(tokenizer, stream_interval=3)
    tell(told, "ab")
    assert not told.worth_sending
    tell(told, "c")
    assert told.worth_sending
    told.answer()
    assert not told.worth_sending
    told.hear(Finished({"type": "length", "length": 3}))
    assert told.worth_sending


def test_prompt_logprobs_begin_with_none(tokenizer):
    """The first listed prompt token has no logprob; texts come when asked for."""
    told = output(tokenizer, shape=Shape(logprobs=True, logprob_text=True), start=1)
    told.hear(Prefilled(1, (-2.0,)))
    assert told.answer()["meta_info"]["input_token_logprobs"] == [
        [None, 2, tokenizer.decode([2])],
        [-2.0, 3, tokenizer.decode([3])],
    ]


def test_stop_strings_are_looked_for_in_the_last_tokens_only(tokenizer):
    """As in SGLang, a stop string is found when it ends within its own length plus one token."""
    stops = Stops(Params(stop=("ab",)), frozenset(), tokenizer)
    assert stops(np.array(tokenizer.encode("xab"), np.int32)) == "ab"
    assert stops(np.array(tokenizer.encode("abxx"), np.int32)) is None


def test_ignore_eos_ignores_stop_tokens_too(tokenizer):
    """SGLang skips both kinds of ids."""
    ids = np.array([9], np.int32)
    assert Stops(Params(stop_token_ids=frozenset({9})), frozenset({5}), tokenizer)(ids) == 9
    assert Stops(Params(), frozenset({9}), tokenizer)(ids) == 9
    assert Stops(Params(stop_token_ids=frozenset({9}), ignore_eos=True), frozenset({9}), tokenizer)(ids) is None
