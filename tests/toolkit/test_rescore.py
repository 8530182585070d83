"""Comparing recorded log-probabilities with the engine's."""

import numpy as np
import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rescore import rescore

PROMPT = np.array([1, 2], np.int32)


@pytest.fixture
def call(book):
    """A call that sampled 3 and 4."""
    book.call("a", [1, 2], [3, 4], logprobs=np.array([-0.25, -0.5], np.float32))
    return book.calls()[0]


def test_the_engine_is_sent_the_exact_ids_and_the_temperature(call, engine):
    """One prefill over prompt and output, log-probabilities from the start."""
    rows = [[None, 1, None], [-1.0, 2, None], [-0.25, 3, None], [-0.75, 4, None]]
    engine.answers["/generate"] = {"meta_info": {"input_token_logprobs": rows}}
    compared = rescore(call, PROMPT, engine.url)
    assert compared.recomputed.tolist() == [-0.25, -0.75]
    assert compared.largest == 0.25
    (body,) = engine.bodies
    assert body["input_ids"] == [1, 2, 3, 4]
    assert body["sampling_params"] == {"max_new_tokens": 1, "temperature": 1.0}
    assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)


def test_an_engine_that_scored_other_tokens_is_refused(call, engine):
    """The ids of the answer are checked."""
    rows = [[None, 1, None], [-1.0, 2, None], [-0.25, 9, None], [-0.75, 4, None]]
    engine.answers["/generate"] = {"meta_info": {"input_token_logprobs": rows}}
    with pytest.raises(Refusal, match="other tokens"):
        rescore(call, PROMPT, engine.url)


def test_another_server_is_refused(call, engine):
    """The sentence names it."""
    engine.answers["/generate"] = {"choices": []}
    with pytest.raises(Refusal, match="input_token_logprobs"):
        rescore(call, PROMPT, engine.url)


def test_an_engine_that_answers_an_error_is_refused(call, engine):
    """The sentence says what to do."""
    with pytest.raises(Refusal, match="--engine"):
        rescore(call, PROMPT, engine.url)


def test_a_call_without_output_is_refused(book, engine):
    """There is nothing to score."""
    book.call("gone", [1], [], status="lost")
    with pytest.raises(Refusal, match="no sampled tokens"):
        rescore(book.calls()[0], PROMPT, engine.url)


def test_a_call_at_another_temperature_is_refused(book, engine):
    """The engine's prompt log-probabilities are untempered: the difference would not be an error."""
    book.call("warm", [1, 2], [3], temperature=0.5)
    with pytest.raises(Refusal, match=r"temperature 0\.5"):
        rescore(book.calls()[0], PROMPT, engine.url)
