"""The client of the engine: exact ids and logprobs, and every way in which an engine says no."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_mitm.engine import PROBE, Sample, SGLang, Span
from polar_mitm.errors import (
    BadRequest,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    TokenizerMismatch,
)
from polar_toolkit.rollout.harnesses.scripted_engine import CONTEXT, Fault, ScriptedEngine
from tests.mitm.canned import answering

PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
REPLY = "Twelve tokens or more, so that several events are needed: naïve 北京."
CHUNK: dict[str, Any] = {
    "text": "", "output_ids": [1, 2],
    "meta_info": {
        "completion_tokens": 2, "finish_reason": None, "weight_version": "v1",
        "output_token_logprobs": [[-0.5, 1, None], [-0.25, 2, None]],
    },
}  # fmt: skip


def using[T](url: str, work: Callable[[SGLang], Awaitable[T]]) -> T:
    """Do something with a client."""

    async def run() -> T:
        client = SGLang(url)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


async def samples(client: SGLang, ids: list[int], **sampling: Any) -> list[Sample]:
    prompt = np.array(ids, np.int32)
    return [sample async for sample in client.generate(prompt, {"max_new_tokens": 100} | sampling, "rid")]


def generate(url: str, ids: list[int] | None = None) -> list[Sample]:
    return using(url, lambda client: samples(client, ids or [1]))


def event(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


@pytest.mark.parametrize("cumulative", [False, True], ids=["incremental", "cumulative"])
def test_a_stream_gives_every_id_and_logprob_once(qwen3_folder: Path, *, cumulative: bool) -> None:
    """Whether each event holds what is new or everything so far: the sample is what the engine handed out."""
    with ScriptedEngine(qwen3_folder, [REPLY], cumulative=cumulative).serving() as engine:
        got = generate(engine.url, engine.encode(PROMPT))
    (call,) = engine.calls
    assert len(got) > 3
    assert np.array_equal(np.concatenate([s.ids for s in got]), call.output_ids)
    assert np.array_equal(np.concatenate([s.logprobs for s in got]), np.array(call.logprobs, np.float32))
    assert {(s.ids.dtype, s.logprobs.dtype) for s in got} == {(np.dtype(np.int32), np.dtype(np.float32))}


@pytest.mark.parametrize(
    ("cumulative", "budget", "most"), [(False, 8000, 24), (True, 8000, 300), (True, 500, 24)],
    ids=["incremental", "cumulative, long", "cumulative, short"],
)  # fmt: skip
def test_pieces_are_short_unless_the_stream_repeats_itself(
    qwen3_folder: Path, *, cumulative: bool, budget: int, most: int
) -> None:
    """300 ms of tokens in a piece; a cumulative stream is asked for so few that it stays near 20 times the reply."""

    async def asked(client: SGLang) -> None:
        await client.describe()
        await samples(client, engine.encode(PROMPT), max_new_tokens=budget)

    with ScriptedEngine(qwen3_folder, [REPLY], cumulative=cumulative).serving() as engine:
        using(engine.url, asked)
    interval = engine.calls[0].sampling["stream_interval"]
    assert most / 2 <= interval <= most
    if cumulative:
        assert budget / interval / 2 <= 20


def test_the_last_piece_says_how_it_ended_and_which_weights_sampled(qwen3_folder: Path) -> None:
    """finish_reason and weight versions are the engine's own."""
    with ScriptedEngine(qwen3_folder, [REPLY]).serving() as engine:
        *_, last = generate(engine.url, engine.encode(PROMPT))
    total = len(engine.calls[0].output_ids)
    assert last.finish == engine.calls[0].finish
    assert last.versions == (Span(0, total, "scripted-0"),)


def test_an_engine_that_names_one_version_gives_one_span() -> None:
    """Engines without weight_versions have one version in each answer."""
    chunk = CHUNK | {"meta_info": CHUNK["meta_info"] | {"finish_reason": {"type": "stop"}}}
    with answering(200, event(chunk) + "data: [DONE]\n\n") as url:
        (sample,) = generate(url)
    assert sample.versions == (Span(0, 2, "v1"),)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"error": {"message": "input_ids cannot be empty."}}, "input_ids cannot be empty."),
        ({"error": "unknown field `max_tokens`"}, "unknown field `max_tokens`"),
        ({"object": "error", "message": "Expecting value", "type": "Bad Request", "code": 400}, "Expecting value"),
        ({"detail": "?"}, "detail"),
        ([1], "[1]"),
    ],
)
def test_each_error_shape_is_read(body: object, said: str) -> None:
    """SGLang has three shapes for an error; what is none of them is quoted."""
    with answering(400, json.dumps(body)) as url, pytest.raises(EngineError) as raised:
        generate(url)
    assert "400" in str(raised.value)
    assert said in str(raised.value)


def test_an_error_that_is_no_json_is_quoted() -> None:
    """A proxy before the engine answers in HTML."""
    with answering(500, "<h1>oops</h1>") as url, pytest.raises(EngineError, match=r"500: <h1>oops"):
        generate(url)


@pytest.mark.parametrize(
    "error", [{"message": "out of memory", "code": 500}, {"message": "out of memory"}, "out of memory"]
)
def test_an_error_inside_a_stream_is_an_error(error: object) -> None:
    """The stream began with 200, the error is its next event."""
    with (
        answering(200, event(CHUNK) + event({"error": error}) + "data: [DONE]\n\n") as url,
        pytest.raises(EngineError, match="out of memory"),
    ):
        generate(url)


@pytest.mark.parametrize(
    "nonsense",
    [
        "data: {\n\n",
        "data: 3\n\n",
        "data: {}\n\n",
        event(CHUNK | {"output_ids": [1]}),
        event(CHUNK | {"meta_info": CHUNK["meta_info"] | {"output_token_logprobs": None}}),
        event(CHUNK | {"meta_info": CHUNK["meta_info"] | {"output_token_logprobs": [1, 2]}}),
    ],
)
def test_a_stream_that_is_not_the_contract_is_an_engine_error(nonsense: str) -> None:
    """Ids without logprobs, or no JSON at all: the call fails with a sentence."""
    with answering(200, nonsense) as url, pytest.raises(EngineError):
        generate(url)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_engine_that_is_full_or_starting_is_unavailable(status: int) -> None:
    """The caller may try again."""
    with answering(status, "busy") as url, pytest.raises(EngineUnavailable, match="busy"):
        generate(url)


def test_a_full_queue_is_unavailable(qwen3_folder: Path) -> None:
    """SGLang's own 503."""
    with ScriptedEngine(qwen3_folder, [REPLY]).serving() as engine:
        engine.faults.append(Fault("overloaded"))
        with pytest.raises(EngineUnavailable, match="queue is full"):
            generate(engine.url, engine.encode(PROMPT))


def test_a_refused_connection_is_unavailable() -> None:
    """Nobody listens: the message names the engine's URL."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(EngineUnavailable, match=url):
        generate(url)
    with pytest.raises(EngineUnavailable, match=url):
        using(url, SGLang.describe)


@pytest.mark.parametrize("missing", [0, 100], ids=["closed", "cut"])
def test_a_stream_without_a_finish_is_unavailable(missing: int) -> None:
    """An engine that died in the middle: what came before was given out, the caller may go on."""

    async def read(client: SGLang) -> list[Sample]:
        stream = client.generate(np.array([1], np.int32), {"max_new_tokens": 9}, "rid")
        got = [await anext(stream)]
        with pytest.raises(EngineUnavailable):
            await anext(stream)
        return got

    with answering(200, event(CHUNK), missing=missing) as url:
        (sample,) = using(url, read)
    assert sample.ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    "words",
    [
        "The input (40000 tokens) is longer than the model's context length (32768 tokens).",
        "Input length (40000 tokens) exceeds the maximum allowed length (32768 tokens). Use a shorter input.",
    ],
)
def test_an_overflow_is_told_with_its_numbers(words: str) -> None:
    """Harnesses compact when they are told so in their provider's words, which hold the numbers."""
    with answering(400, json.dumps({"error": {"message": words}})) as url, pytest.raises(ContextOverflow) as raised:
        generate(url)
    assert (raised.value.prompt_tokens, raised.value.limit) == (40_000, 32_768)


def test_the_engines_own_overflow_is_read(qwen3_folder: Path) -> None:
    """The same from a server that counts."""
    with (
        ScriptedEngine(qwen3_folder, [REPLY]).serving() as engine,
        pytest.raises(ContextOverflow, match=str(CONTEXT + 1)),
    ):
        generate(engine.url, [1] * (CONTEXT + 1))


@pytest.mark.parametrize("bad", [-5, 151_669, 999_999_999])
def test_an_id_outside_the_vocabulary_is_never_sent(qwen3_folder: Path, bad: int) -> None:
    """One such id kills a SGLang server."""

    async def ask(client: SGLang, probe: list[int]) -> None:
        await client.check_tokenizer(probe, 151_669)
        with pytest.raises(BadRequest, match="151669"):
            await samples(client, [1, bad, 2])

    with ScriptedEngine(qwen3_folder, [REPLY]).serving() as engine:
        using(engine.url, lambda client: ask(client, engine.encode(PROBE)))
    assert engine.calls == []


def test_another_tokenizer_is_refused(qwen3_folder: Path) -> None:
    """The message shows both encodings of the probe and names the option."""
    with ScriptedEngine(qwen3_folder, [REPLY]).serving() as engine:
        probe = engine.encode(PROBE)
        with pytest.raises(TokenizerMismatch, match="polar_tokenizer") as raised:
            using(engine.url, lambda client: client.check_tokenizer(probe[:-1], 151_669))
    assert str(probe) in str(raised.value)


def test_an_engine_describes_itself(qwen3_folder: Path) -> None:
    """Model, context and weight version."""
    with ScriptedEngine(qwen3_folder, [REPLY]).serving() as engine:
        described = using(engine.url, SGLang.describe)
    assert (described.model, described.context) == (str(qwen3_folder), CONTEXT)
    assert described.weight_version == "scripted-0"


@pytest.mark.parametrize("body", ["{}", "[]", "<html>", '{"data": []}', '{"data": [{"max_model_len": "x"}]}'])
def test_a_server_that_is_no_sglang_is_told_apart(body: str) -> None:
    """Whatever answers at the URL must answer with SGLang's description."""
    with answering(200, body) as url, pytest.raises(EngineError, match=url):
        using(url, SGLang.describe)


def test_an_abort_never_raises() -> None:
    """An engine that is gone has aborted already."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    using(url, lambda client: client.abort("rid"))


def test_closing_the_reader_closes_the_connection(qwen3_folder: Path) -> None:
    """Who stops reading stops the engine: it sees its client leave."""

    async def first(client: SGLang, prompt: list[int]) -> None:
        async with aclosing(client.generate(np.array(prompt, np.int32), {"max_new_tokens": 9}, "rid")) as stream:
            await anext(stream)

    with ScriptedEngine(qwen3_folder, [REPLY]).serving() as engine:
        engine.faults.append(Fault("hold", after=4))
        using(engine.url, lambda client: first(client, engine.encode(PROMPT)))
        assert engine.calls[0].ended.wait(5)
    assert engine.calls[0].disconnected
