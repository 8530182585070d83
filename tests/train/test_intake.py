"""What a `/generate` body may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polar_train.intake import read_job
from polar_train.sampling import Malformed, Refused
from polar_train.served import Engine


@pytest.fixture(scope="module")
def engine(tiny_model) -> Iterator[Engine]:
    engine = Engine(tiny_model)
    yield engine
    engine.close()


def test_ids_and_text_name_the_same_prompt(engine):
    """A text is encoded by the model's tokenizer, ids are taken as they are."""
    ids = engine.tokenizer.encode("hi")
    [from_ids], [from_text] = (read_job(engine, body).outputs for body in ({"input_ids": ids}, {"text": "hi"}))
    assert from_ids.prompt.tolist() == from_text.prompt.tolist() == ids


def test_one_prompt_is_an_answer_and_a_batch_a_list(engine):
    """A batch of one is still a list, and so is n > 1."""
    assert not read_job(engine, {"input_ids": [1]}).several
    assert read_job(engine, {"input_ids": [[1]]}).several
    assert len(read_job(engine, {"input_ids": [[1], [2, 3]], "sampling_params": {"n": 2}}).outputs) == 4


def test_a_rid_is_kept_and_a_missing_one_is_made(engine):
    """Each output has an id of its own, given or fresh."""
    assert read_job(engine, {"input_ids": [1], "rid": "mine"}).outputs[0].rid == "mine"
    fresh = read_job(engine, {"input_ids": [1], "rid": "mine", "sampling_params": {"n": 2}}).outputs
    assert len({output.rid for output in fresh}) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": "abc"}, {"input_ids": [1, "a"]}, {"input_ids": [True]}, {"text": 3}, {"input_ids": [1], "rid": 5},
        {"input_ids": [1], "sampling_params": "hot"}, {"input_ids": [[1], [2]], "sampling_params": [{}]},
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_are_malformed(engine, body):
    """They have the shape of a validation error, also when a stream was asked for."""
    with pytest.raises(Malformed, match="1 validation error"):
        read_job(engine, body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "Either text, input_ids or input_embeds should be provided"),
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"input_ids": [320]}, "320, outside the model's vocabulary of 320"),
        ({"input_ids": [-1]}, "-1, outside the model's vocabulary of 320"),
        ({"input_ids": [1] * 4096}, r"The input \(4096 tokens\) is longer than the model's context length"),
        ({"input_ids": [1] * 4000, "sampling_params": {"max_new_tokens": 97}}, "a total of 4097 tokens: 4000 tokens"),
        ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num=2 is not supported"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len must be"),
        ({"input_ids": [1], "rid": "a", "sampling_params": {"json_schema": "{"}}, "Failed to compile json_schema"),
    ],
)
def test_what_cannot_be_computed_is_refused(engine, body, words):
    """The message says what is wrong."""
    with pytest.raises(Refused, match=words):
        read_job(engine, body)


def test_the_choices_of_a_seeded_request_differ(engine):
    """Each choice draws from a seed of its own, so that n samples are n samples."""
    import torch

    job = read_job(engine, {"input_ids": [1], "sampling_params": {"n": 2, "sampling_seed": 1}})
    first, second = ([chooser.choose(torch.zeros(320))[0] for _ in range(8)] for chooser in job.choosers)
    assert first != second
