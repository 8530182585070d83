"""The engine: token ids in, sampled ids and logprobs out. The SGLang `/generate` client.

Invariant: what comes out is exactly what the engine sampled, once, whether its stream is cumulative or incremental; an
id outside the vocabulary is never sent (one such id kills a SGLang 0.5.23 server). This module knows no text, except
for the probe string that compares tokenizers.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from polar_mitm.errors import BadRequest, ContextOverflow, EngineError, EngineUnavailable, TokenizerMismatch

Tokens = NDArray[np.int32]
Logprobs = NDArray[np.float32]
_OVERFLOW = re.compile(r"\((\d+) tokens\)[^(]*(?:context|maximum allowed) length \((\d+) tokens\)")
_PIECE_SECONDS = 0.3
"""What lies between two pieces. Each costs the proxy over half a millisecond, most of it in mitmproxy."""
_ABORT = aiohttp.ClientTimeout(total=5.0)
_PLAIN = aiohttp.ClientTimeout(total=30.0, sock_connect=5.0)
_STREAM = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
_IDLE_SECONDS = 4.0
"""SGLang closes a connection that was idle for 5 s."""
_LONG_REPLY = 8000
"""Tokens; a cumulative stream of a longer reply may be longer than 20 times the reply."""
_MOST_CUMULATIVE_PIECES = 36
_UNREACHED = (aiohttp.ClientError, TimeoutError)
PROBE = "Probe 0: naïve Ünïcode 北京 🧭\n\tdef f(x):  return x  # <end>"


@dataclass(frozen=True, slots=True)
class Span:
    """Which weight version sampled output tokens [start, end)."""

    start: int
    end: int
    version: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A piece of a generation."""

    ids: Tokens
    """New sampled ids, int32 [N]."""
    logprobs: Logprobs
    """Their log-probabilities under logits / temperature, float32 [N]."""
    finish: dict[str, Any] | None = None  # Any: JSON
    """The engine's finish_reason on the last piece: {"type": "stop" | "length" | "abort", ...}."""
    versions: tuple[Span, ...] = ()
    """Of this attempt's tokens so far, this piece included."""
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Description:
    """What an engine says of itself."""

    model: str
    context: int
    """Longest prompt + output, in tokens."""
    weight_version: str


class Engine(Protocol):
    """What a turn needs of an engine."""

    async def describe(self) -> Description:
        """The served model; raises EngineUnavailable or EngineError."""
        ...

    async def check_tokenizer(self, ids: Sequence[int], vocabulary: int) -> None:
        """Raises TokenizerMismatch when the engine's ids of `PROBE` are not these."""
        ...

    def generate(self, prompt: Tokens, sampling: dict[str, Any], rid: str) -> AsyncGenerator[Sample]:
        """Sample from a prompt; raises EngineUnavailable (try again) or EngineError. Close it to stop reading."""
        ...

    async def abort(self, rid: str) -> None:
        """Stop a generation; never raises."""
        ...


class SGLang:
    """One SGLang server (0.5.x), or any server that speaks the same `/generate`."""

    def __init__(self, url: str) -> None:
        # no environment proxies: the engine is local to the run, and the proxy variables may point at ourselves
        connections = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
        self._client = aiohttp.ClientSession(connector=connections, trust_env=False, timeout=_STREAM)
        self.url = url.rstrip("/")
        self._vocabulary: int | None = None
        self._incremental = False
        self._tokens_a_second = 80.0  # of one generation; a guess until the first was seen

    async def describe(self) -> Description:
        """Model, context length and weight version, from /model_info and /v1/models, and how /server_info streams."""
        info, models = await self._get("/model_info"), await self._get("/v1/models")
        self._incremental = await self._streams_increments()
        try:
            context = int(models["data"][0]["max_model_len"])
            return Description(str(info["model_path"]), context, str(info.get("weight_version", "default")))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{self.url}/v1/models is not SGLang's answer: {models!r}") from error

    async def _streams_increments(self) -> bool:
        try:
            return bool((await self._get("/server_info")).get("incremental_streaming_output"))
        except EngineError:  # a server without that route: taken for SGLang's default, which repeats everything
            return False

    async def check_tokenizer(self, ids: Sequence[int], vocabulary: int) -> None:
        """Compare the ids of PROBE, and remember the vocabulary for checking prompts."""
        answer = await self._post("/tokenize", {"prompt": PROBE, "add_special_tokens": False})
        if answer.get("tokens") != list(ids):
            raise TokenizerMismatch(
                f"the tokenizer does not agree with the engine at {self.url}: {PROBE!r} is {list(ids)} here and "
                f"{answer.get('tokens')} there; set polar_tokenizer to the tokenizer of the served model"
            )
        self._vocabulary = vocabulary

    async def generate(self, prompt: Tokens, sampling: dict[str, Any], rid: str) -> AsyncGenerator[Sample]:
        """Stream one generation."""
        if self._vocabulary is not None and (prompt.min() < 0 or prompt.max() >= self._vocabulary):
            raise BadRequest(f"the prompt holds token ids outside the vocabulary of {self._vocabulary}")
        body = {
            "sampling_params": {**sampling, "stream_interval": self._interval(sampling)},
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
            "rid": rid,
        }
        try:
            async with self._client.post(self.url + "/generate", **_content(body, prompt)) as response:
                if response.status != 200:
                    raise _refusal(response.status, await response.read())
                reader = _Reader()
                async for line in _lines(response.content):
                    if line.startswith(b"data:") and (sample := reader.take(line[5:].strip())):
                        yield sample
                if not reader.finished:
                    raise EngineUnavailable(f"the engine at {self.url} ended its stream without a finish reason")
                self._tokens_a_second = reader.tokens_a_second or self._tokens_a_second
        except _UNREACHED as error:
            raise EngineUnavailable(f"the engine at {self.url} cannot be reached: {error!r}") from error

    def _interval(self, sampling: dict[str, Any]) -> int:  # Any: JSON
        """Tokens in a piece: 300 ms of them; a stream that repeats itself must not become 20 times the reply.

        SGLang sends the first token at once whatever the interval.
        """
        apart = round(self._tokens_a_second * _PIECE_SECONDS)
        if not self._incremental:
            apart = max(apart, -(-min(int(sampling["max_new_tokens"]), _LONG_REPLY) // _MOST_CUMULATIVE_PIECES))
        return max(1, apart)

    async def abort(self, rid: str) -> None:
        """Best effort: an engine that is gone has aborted already."""
        try:
            async with self._client.post(self.url + "/abort_request", timeout=_ABORT, **_content({"rid": rid})):
                return
        except _UNREACHED:
            return

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _get(self, path: str) -> dict[str, Any]:  # Any: JSON
        return await self._json("GET", path)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        return await self._json("POST", path, **_content(body))

    async def _json(self, method: str, path: str, **content: Any) -> dict[str, Any]:  # Any: JSON
        try:
            async with self._client.request(method, self.url + path, timeout=_PLAIN, **content) as response:
                answer = await response.read()
                if response.status != 200:
                    raise _refusal(response.status, answer)
                return dict(json.loads(answer))
        except _UNREACHED as error:
            raise EngineUnavailable(f"the engine at {self.url} cannot be reached: {error!r}") from error
        except (ValueError, TypeError) as error:
            raise EngineError(f"{self.url}{path} did not answer with a JSON object: {error!r}") from error


def _content(body: dict[str, Any], input_ids: Tokens | None = None) -> dict[str, Any]:  # Any: JSON
    """A request's body: a stream of bytes, because aiohttp warns of a long one in one piece.

    Ids are written from their buffer: as a Python list, a million of them are 40 MB.
    """
    data = json.dumps(body, separators=(",", ":")).encode()
    if input_ids is not None:
        ids = orjson.dumps(np.ascontiguousarray(input_ids), option=orjson.OPT_SERIALIZE_NUMPY)
        data = b'{"input_ids":' + ids + b"," + data[1:]
    return {"data": io.BytesIO(data), "headers": {"content-type": "application/json"}}


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    """The lines of a body, however long they are, as soon as they are whole."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    yield rest


class _Reader:
    """Reads stream chunks, cumulative (SGLang's default) or incremental, into new pieces."""

    def __init__(self) -> None:
        self._seen = 0
        self._versions: tuple[Span, ...] = ()
        self._first = self._last = (0, 0.0)  # tokens, and when they were there
        self.finished = False

    @property
    def tokens_a_second(self) -> float:
        """Speed of the stream after its first piece; 0 when it had only one."""
        (first, began), (last, ended) = self._first, self._last
        return (last - first) / (ended - began) if ended > began else 0.0

    def take(self, data: bytes) -> Sample | None:
        """The new piece of a chunk; raises EngineError or EngineUnavailable."""
        if data == b"[DONE]":
            return None
        try:
            return self._sample(json.loads(data))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"the engine's stream is not SGLang's: {data[:200]!r} ({error!r})") from error

    def _sample(self, chunk: dict[str, Any]) -> Sample:  # Any: JSON
        if "error" in chunk:
            code = chunk["error"].get("code") if isinstance(chunk["error"], dict) else None
            raise _refusal(int(code or 500), json.dumps(chunk).encode())
        meta, ids = chunk["meta_info"], chunk["output_ids"]
        total = int(meta["completion_tokens"])
        new = total - self._seen
        triples = meta.get("output_token_logprobs") or []
        if len(ids) < new or len(triples) < new:
            raise EngineError(f"the engine reported {new} new tokens with {len(ids)} ids and {len(triples)} logprobs")
        self._versions = _spans(meta, self._versions, self._seen, total)
        self._seen = total
        self._last = (total, time.monotonic())
        self._first = self._first if self._first[0] else self._last
        finish = meta.get("finish_reason")
        self.finished = finish is not None
        return Sample(
            np.asarray(ids[len(ids) - new :], dtype=np.int32),
            np.asarray([t[0] for t in triples[len(triples) - new :]], dtype=np.float32),
            finish,
            self._versions,
            int(meta.get("cached_tokens") or 0),
        )


def _spans(meta: dict[str, Any], before: tuple[Span, ...], start: int, end: int) -> tuple[Span, ...]:  # Any: JSON
    """The versions so far: the engine's own account where it gives one (SGLang on its last chunk), else by chunks."""
    if spans := meta.get("weight_versions"):
        return tuple(Span(int(s["start"]), int(s["end"]), str(s["version"])) for s in spans)
    version = str(meta.get("weight_version", "default"))
    if before and before[-1].version == version:
        return (*before[:-1], replace(before[-1], end=end))
    return (*before, Span(start, end, version)) if end > start else before


def _refusal(status: int, body: bytes) -> ContextOverflow | EngineError | EngineUnavailable:
    """SGLang's three error shapes as one exception."""
    try:
        answer = json.loads(body)
        error = answer.get("error", answer)
        message = error if isinstance(error, str) else error.get("message", str(error))
    except (ValueError, AttributeError):
        message = body[:500].decode("utf-8", "replace")
    if overflow := _OVERFLOW.search(message):
        return ContextOverflow(int(overflow[1]), int(overflow[2]))
    kind = EngineUnavailable if status in {429, 502, 503, 504} else EngineError
    return kind(f"the engine answered {status}: {message}")
