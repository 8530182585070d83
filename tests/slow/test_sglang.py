"""The real SGLang 0.5.23 keeps the contract of an engine, agrees with the embedded engine, and is read rightly.

The same cases hold the embedded engine in tests/train/test_serve.py. On a CPU in float32; `make sglang` installs it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from polar_mitm.engine import PROBE, Sample, SGLang
from tests.train.engine_contract import (
    CASES,
    Served,
    a_stream_adds_up_to_the_plain_answer,
    chat_ids,
    expected,
    tokenizer,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXTS = ("What is the capital of France?", "Count from one to ten.", "Write a haiku about a proxy.")
ROUNDING = 1e-4
"""Largest difference of two float32 logprobs of one token, in nats; 7.5e-6 was seen."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_real_sglang_keeps_the_contract(case, sglang_url, smollm2):
    """Each case of engine_contract.py holds for SGLang itself."""
    case(Served(sglang_url, smollm2))


def test_incremental_streams_of_the_real_sglang_add_up(sglang_incremental_url, smollm2):
    """With --incremental-streaming-output the chunks are deltas of ids, text and logprobs."""
    a_stream_adds_up_to_the_plain_answer(Served(sglang_incremental_url, smollm2, incremental=True))


@pytest.mark.parametrize("text", TEXTS)
def test_both_engines_choose_the_same_greedy_tokens(text, smollm2, sglang_url, embedded_url):
    """At temperature 0 the ids are equal and the logprobs differ by rounding only."""
    real, ours = (generate(url, chat_ids(smollm2, text), temperature=0) for url in (sglang_url, embedded_url))
    assert real.ids.tolist() == ours.ids.tolist()
    assert np.abs(real.logprobs - ours.logprobs).max() < ROUNDING


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}])
@pytest.mark.parametrize("engine", ["sglang_url", "embedded_url"])
def test_recorded_logprobs_are_those_of_a_plain_forward(engine, sampling, text, smollm2, request):
    """What the client reads is log_softmax(logits / temperature) of a Hugging Face float32 forward, before top_p."""
    url, prompt = request.getfixturevalue(engine), chat_ids(smollm2, text)
    output = generate(url, prompt, **sampling)
    wanted = expected(Served(url, smollm2), prompt, output.ids.tolist(), sampling["temperature"])[len(prompt) - 1 :]
    assert np.abs(output.logprobs - wanted).max() < ROUNDING


def test_the_client_reads_both_ways_of_streaming_alike(smollm2, sglang_url, sglang_incremental_url):
    """Each sampled token is yielded once, whether chunks are cumulative or deltas."""
    prompt = chat_ids(smollm2, TEXTS[1])
    cumulative, incremental = (generate(url, prompt, temperature=0) for url in (sglang_url, sglang_incremental_url))
    assert cumulative.ids.tolist() == incremental.ids.tolist()
    assert np.abs(cumulative.logprobs - incremental.logprobs).max() < ROUNDING


def test_the_clients_last_piece_says_why_and_under_which_version(smollm2, sglang_url):
    """The finish reason, and version spans that cover the whole output, come with the last piece."""
    last = generate(sglang_url, chat_ids(smollm2, TEXTS[1]), temperature=0, max_new_tokens=5).last
    assert last.finish == {"type": "length", "length": 5}
    assert [(span.start, span.end) for span in last.versions] == [(0, 5)]


def test_the_tokenizer_of_the_model_agrees_with_the_real_sglang(smollm2, sglang_url):
    """The client's start-up check passes for the served model's own tokenizer, and the context length is read."""
    ids = tokenizer(smollm2).encode(PROBE, add_special_tokens=False)

    async def ask(client: SGLang) -> int:
        await client.check_tokenizer(ids, len(tokenizer(smollm2)))
        return (await client.describe()).context

    assert with_client(sglang_url, ask) == 8192


def test_the_client_keeps_what_was_sampled_before_an_abort(smollm2, sglang_url):
    """A call that is aborted on the real SGLang ends with the finish reason `abort` and its partial ids."""
    prompt, rid = np.asarray(chat_ids(smollm2, TEXTS[1]), np.int32), uuid.uuid4().hex

    async def cut_short(client: SGLang) -> list[Sample]:
        samples: list[Sample] = []
        async for sample in client.generate(prompt, {"max_new_tokens": 500, "ignore_eos": True}, rid):
            if not samples:
                await client.abort(rid)
            samples.append(sample)
        return samples

    samples = with_client(sglang_url, cut_short)
    assert samples[-1].finish is not None
    assert samples[-1].finish["type"] == "abort"
    assert 0 < sum(len(sample.ids) for sample in samples) < 500


@dataclass(frozen=True, slots=True)
class Output:
    """One whole generation as the client read it."""

    ids: np.ndarray
    logprobs: np.ndarray
    last: Sample


def generate(url: str, prompt: list[int], **sampling: Any) -> Output:  # Any: JSON
    """One generation through the project's client; at most 24 tokens unless said."""

    async def collect(client: SGLang) -> list[Sample]:
        stream = client.generate(np.asarray(prompt, np.int32), {"max_new_tokens": 24, **sampling}, uuid.uuid4().hex)
        return [sample async for sample in stream]

    samples = with_client(url, collect)
    ids, logprobs = (np.concatenate([getattr(sample, name) for sample in samples]) for name in ("ids", "logprobs"))
    return Output(ids, logprobs, samples[-1])


def with_client[T](url: str, use: Callable[[SGLang], Awaitable[T]]) -> T:
    """The result of `use(client)`."""

    async def run() -> T:
        client = SGLang(url)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())
