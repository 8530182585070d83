"""An engine that plays given texts: SGLang's `/generate` subset, since a model small enough for tests cannot act.

Invariant: what it plays is the tokenizer's own encoding of the script's text, closed by the stop token, with a
log-probability per token that no other token of this engine ever gets; everything it was sent is in `calls`. It is as
strict as SGLang about what it is sent (unknown sampling keys, ids outside the vocabulary), samples nothing, and
answers in plain form without watching for a client that leaves.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

Script = Sequence[str] | Callable[[str], str]
"""Replies by turn (the number of assistant turns before this one), or a function of the prompt's text."""
Ids = np.ndarray[tuple[int], np.dtype[np.int32]]
Json = dict[str, Any]  # Any: bodies of requests and answers
_Ending = Literal["release", "abort"]

STOP = "<|im_end|>"
CONTEXT = 131_072
_ASSISTANT = "<|im_start|>assistant"
_SAMPLING_KEYS = frozenset(
    {
        "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
        "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "json_schema", "regex",
        "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
        "stream_interval", "logit_bias", "sampling_seed", "custom_params",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one call."""

    kind: Literal["overloaded", "abort", "hold"]
    """overloaded: 503, the queue is full. abort: the engine cuts the call short, as a weight update does. hold: the
    call stands still until `release()`, an abort or a disconnect."""
    after: int = 0
    """Tokens played before that."""


@dataclass(slots=True)
class EngineCall:
    """One `/generate` as received, and what became of it."""

    rid: str
    prompt_ids: Ids
    sampling: Json
    output_ids: Ids
    """Tokens handed out so far."""
    finish: Json | None = None
    """SGLang's finish_reason; None while it runs, and for ever when the client left."""
    disconnected: bool = False
    """Whether the client left before the end of the stream."""
    logprobs: list[float] = field(default_factory=list[float])
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when nothing more will be handed out."""


class ScriptedEngine:
    """Plays a script to whoever posts to `url`; see `serving`."""

    def __init__(self, folder: Path, script: Script, *, piece: int = 4, cumulative: bool = False) -> None:
        """`folder` holds the tokenizer, `piece` is the number of tokens in a streamed event.

        Events are increments, as with SGLang's --incremental-streaming-output, unless `cumulative`.
        """
        self.url = ""
        self.calls: list[EngineCall] = []
        self.faults: list[Fault | None] = []
        """Taken by the next calls, in order; None is a call without a fault."""
        self.holding = threading.Event()
        """Set when a held call stands still."""
        self.version = "scripted-0"
        """Weight version of the tokens played from now on."""
        self.tokenizer = _tokenizer(folder)
        self._folder = str(folder)
        self._script = script
        self._piece = piece
        self._cumulative = cumulative
        self._played = 0
        self._stop_id = self.encode(STOP)[0]
        self._held: dict[str, asyncio.Future[_Ending]] = {}

    @contextmanager
    def serving(self) -> Generator[ScriptedEngine]:
        """Serve from a thread while inside the block; the port belongs to the calling thread's network."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(self._app(), log_level="warning", ws="none", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield self
        finally:
            server.should_exit = server.force_exit = True  # a held call must not keep the bench
            thread.join()

    def release(self) -> None:
        """Let the held calls go on."""
        for held in [*self._held.values()]:
            held.get_loop().call_soon_threadsafe(_wake, held, "release")

    def encode(self, text: str) -> list[int]:
        """The ids of a text that may hold special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Ids) -> str:
        """The text of ids, special tokens included."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _app(self) -> Starlette:
        routes = [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/abort_request", self._abort, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/model_info", self._model_info),
            Route("/server_info", self._server_info),
            Route("/v1/models", self._models),
            *[Route(path, _ready) for path in ("/health", "/health_generate", "/ready", "/ping")],
        ]
        return Starlette(routes=routes)

    async def _generate(self, request: Request) -> Response:
        body: Json = await request.json()
        complaint = self._complaint(body)
        if complaint:
            return JSONResponse({"error": complaint}, 400)
        fault = self.faults.pop(0) if self.faults else None
        if fault and fault.kind == "overloaded":
            message = "The request queue is full."
            return JSONResponse({"object": "error", "message": message, "type": "503", "param": None, "code": 503}, 503)
        prompt = np.array(body["input_ids"], np.int32)
        call = EngineCall(body["rid"], prompt, body.get("sampling_params", {}), np.zeros(0, np.int32))
        self.calls.append(call)
        if body.get("stream"):
            return StreamingResponse(self._stream(call, fault), media_type="text/event-stream")
        async for _ in self._play(call, fault):
            pass
        call.ended.set()
        return JSONResponse(self._answer(call, 0))

    def _complaint(self, body: Json) -> str | Json | None:
        unknown = body.get("sampling_params", {}).keys() - _SAMPLING_KEYS
        if unknown:
            return f"unknown field `{min(unknown)}`, expected one of `max_new_tokens`, ..."
        ids: list[int] = body.get("input_ids") or []
        if not ids:
            return {"message": "input_ids cannot be empty."}
        if not 0 <= min(ids) <= max(ids) < self.tokenizer.get_vocab_size():
            return {"message": f"id outside the vocabulary ({min(ids)} to {max(ids)}); SGLang itself would die of it"}
        if len(ids) >= CONTEXT:
            longer = f"The input ({len(ids)} tokens) is longer than the model's context length ({CONTEXT} tokens)."
            return {"message": longer}
        return None

    async def _stream(self, call: EngineCall, fault: Fault | None) -> AsyncGenerator[str]:
        try:
            async with aclosing(self._play(call, fault)) as steps:
                async for start in steps:
                    yield f"data: {json.dumps(self._answer(call, 0 if self._cumulative else start))}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            call.disconnected = call.finish is None
            call.ended.set()

    async def _play(self, call: EngineCall, fault: Fault | None) -> AsyncGenerator[int]:
        """Hand out the reply in pieces; yields the place in the output where each begins."""
        ids = self._reply(call.prompt_ids)[: call.sampling.get("max_new_tokens")]
        stop = ids[-1] == self._stop_id
        finish: Json = {"type": "stop", "matched": self._stop_id} if stop else {"type": "length", "length": len(ids)}
        sound = min(fault.after, len(ids)) if fault else len(ids)
        for start in range(0, sound, self._piece):
            self._hand_out(call, ids[start : min(start + self._piece, sound)])
            call.finish = finish if len(call.output_ids) == len(ids) else None
            yield start
        if fault and (fault.kind == "abort" or await self._hold(call.rid) == "abort"):
            call.finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            yield sound
        elif sound < len(ids):
            self._hand_out(call, ids[sound:])
            call.finish = finish
            yield sound

    def _reply(self, prompt_ids: Ids) -> Ids:
        text = self.decode(prompt_ids)
        reply = self._script(text) if callable(self._script) else self._script[text.count(_ASSISTANT) - 1]
        ids = np.array([*self.encode(reply), self._stop_id], np.int32)
        begun = np.array(self.encode(text[text.rindex(_ASSISTANT) + len(_ASSISTANT) + 1 :]), np.int32)
        resumed = len(begun) and np.array_equal(begun, ids[: len(begun)])  # the client goes on after an abort
        return ids[len(begun) :] if resumed else ids

    def _hand_out(self, call: EngineCall, ids: Ids) -> None:
        call.output_ids = np.concatenate([call.output_ids, ids])
        call.logprobs += [-(self._played + i + 1) / 4096 for i in range(len(ids))]  # exact in float32, never twice
        self._played += len(ids)

    async def _hold(self, rid: str) -> _Ending:
        self._held[rid] = asyncio.get_running_loop().create_future()
        self.holding.set()
        try:
            return await self._held[rid]
        finally:
            del self._held[rid]

    def _answer(self, call: EngineCall, start: int) -> Json:
        ids = [int(i) for i in call.output_ids[start:]]
        count = len(call.output_ids)
        spans = {"weight_versions": [{"version": self.version, "start": 0, "end": count}]} if call.finish else {}
        triples = [[logprob, i, None] for logprob, i in zip(call.logprobs[start:], ids, strict=True)]
        meta = {
            "id": call.rid, "finish_reason": call.finish, "weight_version": self.version, "cached_tokens": 0,
            "prompt_tokens": len(call.prompt_ids), "completion_tokens": count,
            "output_token_logprobs": triples, "output_token_logprobs_length": count, **spans,
        }  # fmt: skip
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return {"text": text, "output_ids": ids, "meta_info": meta}

    async def _abort(self, request: Request) -> Response:
        body: Json = await request.json()
        for rid, held in self._held.items():
            if body.get("abort_all") or rid.startswith(body["rid"]):
                _wake(held, "abort")
        return Response()

    async def _tokenize(self, request: Request) -> Response:
        body: Json = await request.json()
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True)).ids
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": CONTEXT})

    async def _model_info(self, _: Request) -> Response:
        return JSONResponse({"model_path": self._folder, "tokenizer_path": self._folder, "is_generation": True,
                             "weight_version": self.version, "model_type": "qwen3"})  # fmt: skip

    async def _server_info(self, _: Request) -> Response:
        return JSONResponse({"incremental_streaming_output": not self._cumulative})

    async def _models(self, _: Request) -> Response:
        model = {"id": self._folder, "object": "model", "owned_by": "sglang", "max_model_len": CONTEXT}
        return JSONResponse({"object": "list", "data": [model]})


@cache
def _tokenizer(folder: Path) -> Tokenizer:  # reading it takes half a second
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


async def _ready(_: Request) -> Response:
    return Response()


def _wake(held: asyncio.Future[_Ending], ending: _Ending) -> None:
    if not held.done():
        held.set_result(ending)
