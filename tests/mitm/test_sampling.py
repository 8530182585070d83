"""The distribution belongs to the run: what the harness asks for is heard for length and schema only."""

from __future__ import annotations

import re

import pytest

from polar_mitm import conversation
from polar_mitm.sampling import Sampling

ASKED = conversation.Sampling()
STOPS = (7, 9)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"temprature": 1}', "temprature"),
        ('{"temperature": -1}', "temperature"),
        ('{"temperature": "hot"}', "temperature"),
        ('{"temperature": true}', "temperature"),
        ('{"temperature": NaN}', "temperature"),
        ('{"top_p": 0}', "top_p"),
        ('{"top_p": 1.5}', "top_p"),
        ('{"top_k": 0.5}', "top_k"),
        ('{"max_new_tokens": 0}', "max_new_tokens"),
        ('{"seed": "abc"}', "seed"),
        ("[]", "JSON object"),
        ("{temperature: 1}", "JSON object"),
    ],
)
def test_a_bad_option_is_named(text: str, named: str) -> None:
    """A wrong `polar_sampling` is refused in one sentence that names the option and the key."""
    with pytest.raises(ValueError, match=f"polar_sampling.*{re.escape(named)}"):
        Sampling.parse(text)


def test_an_unknown_key_is_answered_with_the_known_ones() -> None:
    """The remedy stands in the message."""
    with pytest.raises(ValueError, match=r"known are .*'temperature'.*'seed'"):
        Sampling.parse('{"temp": 1}')


@pytest.mark.parametrize("text", ["", "{}"])
def test_the_default_is_the_models_own_distribution(text: str) -> None:
    """Temperature 1, and nothing that cuts or bends the distribution."""
    applied = Sampling.parse(text).applied(ASKED, 100, STOPS, "s")
    assert applied == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0,
        "presence_penalty": 0.0, "repetition_penalty": 1.0, "max_new_tokens": 100, "stop_token_ids": [7, 9],
    }  # fmt: skip


def test_what_the_harness_asks_of_the_distribution_is_not_applied() -> None:
    """A harness that asks for temperature 0 and top_p still gets the run's distribution."""
    asked = conversation.Sampling(temperature=0.0, top_p=0.1, top_k=1, seed=3)
    run = Sampling(temperature=0.7)
    assert run.applied(asked, 100, STOPS, "s") == run.applied(ASKED, 100, STOPS, "s")


def test_what_the_harness_asks_of_the_distribution_leaves_tokens_trainable() -> None:
    """What was not applied cannot make a token untrainable."""
    asked = conversation.Sampling(temperature=0.0, top_p=0.1, top_k=1)
    assert Sampling().untrainable(asked) is None


def test_a_json_schema_is_applied_and_makes_tokens_untrainable() -> None:
    """A grammar mask bends the distribution in a way that a trainer cannot recompute."""
    asked = conversation.Sampling(json_schema='{"type":"object"}')
    assert Sampling().applied(asked, 100, STOPS, "s")["json_schema"] == '{"type":"object"}'
    assert Sampling().untrainable(asked) == "grammar"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", None),
        ('{"temperature": 0.6}', None),
        ('{"max_new_tokens": 10, "seed": 1}', None),
        ('{"temperature": 0}', "greedy"),
        ('{"top_p": 0.9}', "truncated"),
        ('{"top_k": 40}', "truncated"),
        ('{"min_p": 0.1}', "truncated"),
        ('{"frequency_penalty": 0.1}', "penalty"),
        ('{"presence_penalty": -0.1}', "penalty"),
        ('{"repetition_penalty": 1.1}', "penalty"),
    ],
)
def test_the_runs_own_sampling_says_whether_its_tokens_are_trainable(text: str, reason: str | None) -> None:
    """Temperature, length and seed are harmless; everything else has a reason."""
    assert Sampling.parse(text).untrainable(ASKED) == reason


@pytest.mark.parametrize(
    ("asked", "room", "given"),
    [(None, 500, 300), (50, 500, 50), (400, 500, 300), (400, 20, 20), (50, 0, 1)],
)
def test_the_length_is_the_least_of_run_harness_and_context(asked: int | None, room: int, given: int) -> None:
    """The reply's budget obeys every bound, and is never less than one token."""
    wanted = conversation.Sampling(max_tokens=asked)
    assert Sampling(max_new_tokens=300).applied(wanted, room, STOPS, "s")["max_new_tokens"] == given


def test_the_seed_of_a_call_is_stable() -> None:
    """The same run seed, session and place give the same seed, in another process too."""
    seeds = {Sampling(seed=7).applied(ASKED, 100, STOPS, "s\x000")["sampling_seed"] for _ in range(3)}
    assert seeds == {236_750_593}


def test_the_seeds_of_a_run_differ() -> None:
    """Another session, place or run seed gives another seed, so that samples of a group are independent."""
    given = {
        Sampling(seed=seed).applied(ASKED, 100, STOPS, f"{session}\0{place}")["sampling_seed"]
        for seed in (7, 8)
        for session in ("a", "b")
        for place in range(5)
    }
    assert len(given) == 20
    assert all(0 <= seed < 2**31 for seed in given)


def test_without_a_seed_the_engine_gets_none() -> None:
    """No seed was asked for: the engine draws as it likes."""
    assert "sampling_seed" not in Sampling().applied(ASKED, 100, STOPS, "s")
