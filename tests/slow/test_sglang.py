"""The real SGLang 0.5.23 keeps the contract of an engine, agrees with the embedded engine, and is read rightly.

The same cases hold the embedded engine in tests/train/test_serve.py. On a CPU in float32; `make sglang` installs it.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polar_mitm.engine import PROBE, Sample, SGLang
from polar_train.engines import push
from polar_train.errors import PushFailed
from polar_train.model import load
from polar_train.small_models import fetch
from polar_train.weights import save_checkpoint
from tests.sglang.server import sglang
from tests.train.engine_contract import (
    CASES,
    Served,
    a_stream_adds_up_to_the_plain_answer,
    chat_ids,
    expected,
    reference,
    tokenizer,
)
from tests.train.engine_sets import running

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


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The base URLs of two real SGLangs that serve a small random model."""
    logs = tmp_path_factory.mktemp("pair")
    with sglang(fetch("tiny-qwen3"), logs / "one") as one, sglang(fetch("tiny-qwen3"), logs / "two") as two:
        yield one, two


def test_requests_go_on_over_a_push_to_two_real_sglangs(pair, tmp_path):
    """Both serve the checkpoint; a stream that ran is whole, and each token has the logprob of the version it names."""
    old, room, moving = fetch("tiny-qwen3"), 3000, threading.Event()
    new, prompt = changed(old, tmp_path / "new"), chat_ids(old, TEXTS[1])

    async def stream(client: SGLang) -> list[Sample]:
        samples: list[Sample] = []
        sampling = {"max_new_tokens": room, "ignore_eos": True}
        async for sample in client.generate(np.asarray(prompt, np.int32), sampling, uuid.uuid4().hex):
            moving.set()
            samples.append(sample)
        return samples

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(with_client, pair[0], stream)
        assert moving.wait(120)
        pushed = push(new, pair, "v2")
        samples = reading.result()
    assert all(one.changed == one.tensors and one.disagreement < ROUNDING for one in pushed.each)
    print(f"idle {pushed.idle_s:.2f} s")
    before, after = samples[-1].versions
    assert (before.version, after.version, before.end, after.end) == ("default", "v2", after.start, room)
    ids, logprobs = (np.concatenate([getattr(one, name) for one in samples]) for name in ("ids", "logprobs"))
    for folder, span in ((old, slice(before.end - 5, before.end)), (new, slice(after.start, after.start + 5))):
        wanted = logprobs_within([*prompt, *ids.tolist()], folder, len(prompt) + span.start, len(prompt) + span.stop)
        assert np.abs(logprobs[span] - wanted).max() < ROUNDING
    push(old, pair, "default")


def test_a_real_sglang_gets_its_old_weights_back_when_another_engine_dies(pair, tmp_path):
    """Paused and updated, it is put back to the checksums from before, and goes on."""
    old = fetch("tiny-qwen3")
    back = pytest.raises(PushFailed, match="The old weights are back and serve again")
    with running(old, lambda engine, path, _body: engine.die() if "update" in path else None) as dying, back:
        push(changed(old, tmp_path / "new"), [pair[0], dying.url], "v3")
    prompt = chat_ids(old, TEXTS[0])
    output = generate(pair[0], prompt, temperature=0)
    wanted = expected(Served(pair[0], old), prompt, output.ids.tolist())[len(prompt) - 1 :]
    assert np.abs(output.logprobs - wanted).max() < ROUNDING
    assert output.last.versions[0].version == "default"


def changed(source: Path, out: Path) -> Path:
    """A checkpoint with every weight a little different."""
    model, generator = load(source), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.03 * torch.randn(weight.shape, generator=generator))
    save_checkpoint(model, source, out, {})
    return out


def logprobs_within(ids: list[int], folder: Path, start: int, end: int) -> np.ndarray:
    """Reference logprobs of ids[start:end]; those of all would need the logits of all."""
    model, tokens = reference(folder), torch.tensor(ids)
    with torch.inference_mode():
        hidden = model.model(tokens[None]).last_hidden_state[0, start - 1 : end - 1]
        return model.lm_head(hidden).log_softmax(-1).gather(1, tokens[start:end, None])[:, 0].numpy()


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
