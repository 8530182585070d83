"""Sampling parameters, and the choice of a token from one row of logits."""

from __future__ import annotations

import json

import llguidance.hf
import pytest
import torch
from transformers import AutoTokenizer

from polar_train.sampling import Chooser, Malformed, Params, Refused, UnknownKey, grammar_of, parse_params

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0])


def counts(draws: int = 400, **sampling) -> set[int]:
    """The tokens seen in many seeded draws."""
    chooser = Chooser(Params(sampling_seed=0, **sampling), None)
    return {chooser.choose(LOGITS)[0] for _ in range(draws)}


def test_defaults_are_sglangs():
    """An empty object means 128 tokens at temperature 1 from the whole distribution."""
    assert parse_params({}) == Params(max_new_tokens=128, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, n=1)


def test_null_is_the_default_except_for_max_new_tokens():
    """null means "as if absent"; max_new_tokens null means up to the context."""
    assert parse_params({"temperature": None, "stop": None}) == Params()
    assert parse_params({"max_new_tokens": None}).max_new_tokens is None


def test_stop_may_be_one_string():
    """A single stop string is a list of one."""
    assert parse_params({"stop": "END", "stop_token_ids": [3]}) == Params(stop=("END",), stop_token_ids=frozenset({3}))


def test_an_unknown_key_is_named():
    """A misspelt parameter must not be ignored: it would change the meaning."""
    with pytest.raises(UnknownKey, match="unknown field `max_tokens`, expected one of `max_new_tokens`"):
        parse_params({"max_tokens": 3})


def test_a_known_key_that_is_not_supported_is_refused_unless_it_asks_for_nothing():
    """Penalties of zero are harmless, others are not."""
    assert parse_params({"frequency_penalty": 0, "repetition_penalty": 1}) == Params()
    with pytest.raises(Refused, match=r"repetition_penalty=1\.1 is not supported"):
        parse_params({"repetition_penalty": 1.1})


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", "hot"), ("top_k", 1.5), ("ignore_eos", 1), ("stop", [1]), ("stop_token_ids", ["a"]), ("n", True)],
)
def test_a_value_of_the_wrong_type_is_malformed(key, value):
    """JSON of the wrong type has SGLang's validation shape and names the key."""
    with pytest.raises(Malformed, match=f"sampling_params.{key}") as caught:
        parse_params({key: value})
    assert caught.value.body()["type"] == "Bad Request"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1), ("temperature", float("inf")), ("top_p", 0), ("top_p", 1.1), ("min_p", 2),
        ("top_k", 0), ("max_new_tokens", -1), ("n", 0), ("sampling_seed", 2**64),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused(key, value):
    """What no distribution has is refused by name."""
    with pytest.raises(Refused, match=key):
        parse_params({key: value})


def test_greedy_takes_the_likeliest_with_its_plain_logprob():
    """At temperature 0 the logprob is that of the untempered distribution."""
    token, logprob = Chooser(Params(temperature=0), None).choose(LOGITS)
    assert (token, logprob) == (0, pytest.approx(LOGITS.log_softmax(-1)[0].item()))


def test_a_logprob_is_tempered_and_ignores_the_cuts():
    """top_p, top_k and min_p decide what may be drawn, not the logprob that is told."""
    chooser = Chooser(Params(temperature=0.5, top_p=0.5, top_k=2, min_p=0.1, sampling_seed=1), None)
    token, logprob = chooser.choose(LOGITS)
    assert logprob == pytest.approx((LOGITS / 0.5).log_softmax(-1)[token].item())


def test_cuts_leave_out_what_they_should():
    """top_k keeps k tokens, top_p the smallest set that reaches p, min_p what is likely enough beside the best."""
    assert counts() >= {0, 1, 2}
    assert counts(top_k=2) == {0, 1}
    assert counts(top_p=0.7) == {0, 1}
    assert counts(min_p=0.3) == {0, 1}
    assert counts(top_p=0.01) == {0}


def test_a_seed_repeats_an_output():
    """Equal seeds draw equal tokens, no seed draws anew."""
    flat = torch.zeros(10_000)
    first, second = [Chooser(Params(sampling_seed=3), None).choose(flat) for _ in range(2)]
    assert first == second
    assert len({Chooser(Params(), None).choose(flat)[0] for _ in range(8)}) > 1


def test_a_grammar_masks_the_logits_before_the_logprob(tiny_model):
    """Under a schema the logprob is that of the masked distribution, and after its end only an end token comes."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    grammars = llguidance.hf.from_tokenizer(tokenizer, n_vocab=320)
    chooser = Chooser(Params(temperature=0), grammar_of(json.dumps({"enum": ["a"]}), grammars))
    logits = torch.zeros(320)
    drawn = [chooser.choose(logits) for _ in range(4)]
    assert tokenizer.decode([token for token, _ in drawn[:3]]) == '"a"'
    assert (drawn[3][0], chooser.finished) == (tokenizer.eos_token_id, True)
    assert [logprob for _, logprob in drawn] == [0.0] * 4


@pytest.mark.parametrize("schema", ["{", json.dumps({"type": "no-such-type"})])
def test_a_schema_that_does_not_compile_is_refused(schema, tiny_model):
    """The grammar library's words are passed on."""
    grammars = llguidance.hf.from_tokenizer(AutoTokenizer.from_pretrained(tiny_model), n_vocab=320)
    with pytest.raises(Refused, match="Failed to compile json_schema"):
        grammar_of(schema, grammars)
