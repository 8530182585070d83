"""The embedded engine: the subset of SGLang's HTTP interface that the gateway, the toolkit and the trainer use.

For laptops, examples and tests, on the CPU in float32. Invariant: what it answers, a real SGLang would have answered in
the same shape; what it cannot do is refused with a 400 that says so.
Not here: chat templates and tool calls. It is given ids (or plain text) and gives ids back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from hashlib import sha256
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, cast

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from polar_train.checksums import checksums, overall
from polar_train.intake import Job, checked_ids, read_job, sequence_of
from polar_train.sampling import Malformed, Refused
from polar_train.scheduler import Event
from polar_train.served import Engine


def run(
    model: str,
    host: str,
    port: int,
    *,
    weight_version: str = "default",
    threads: int | None = None,
    max_batch: int = 16,
    incremental: bool = False,
) -> None:
    """Serve a model folder until interrupted; port 0 takes a free one. Prints one line with the URL when ready.

    Raises OSError or ValueError when the folder holds no model this engine can serve.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    engine = Engine(Path(model), weight_version=weight_version, max_batch=max_batch, incremental=incremental)
    with socket.create_server((host, port)) as listener:
        actual = listener.getsockname()[1]
        print(f"engine ready: http://{host}:{actual} ({model})", flush=True)  # noqa: T201 - the line that callers wait for
        server = uvicorn.Server(uvicorn.Config(app(engine), log_level="warning", timeout_graceful_shutdown=5))
        try:
            server.run(sockets=[listener])
        finally:
            engine.close()


def app(engine: Engine) -> Starlette:
    """The ASGI application over `engine`."""

    def route(path: str, handler: Callable[[Engine, Request], Any], methods: str = "GET POST") -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                return await handler(engine, request)
            except Refused as refused:
                return JSONResponse(refused.body(), status_code=400)

        return Route(path, endpoint, methods=methods.split())

    return Starlette(
        routes=[
            route("/generate", _generate, "POST PUT"),
            route("/abort_request", _abort_request, "POST"),
            *(route(path, _health) for path in ("/health", "/ready", "/ping")),
            route("/health_generate", _health_generate),
            *(route(path, _model_info) for path in ("/model_info", "/get_model_info")),
            *(route(path, _server_info) for path in ("/server_info", "/get_server_info")),
            route("/v1/models", _models),
            route("/tokenize", _tokenize, "POST"),
            route("/detokenize", _detokenize, "POST"),
            route("/flush_cache", _flush_cache),
            route("/update_weights_from_disk", _update_weights_from_disk, "POST"),
            route("/update_weight_version", _update_weight_version, "POST"),
            route("/weights_checker", _weights_checker),
            route("/pause_generation", _pause_generation, "POST"),
            route("/continue_generation", _continue_generation, "POST"),
        ]
    )


# ---------------------------------------------------------------------------------------------------- generating


async def _generate(engine: Engine, request: Request) -> Response:
    body = await _json(request)
    streamed = bool(body.get("stream"))
    try:
        job = read_job(engine, body)
    except Refused as refused:
        if streamed and refused.in_stream:
            return StreamingResponse(_error_stream(refused), media_type="text/event-stream")
        raise
    if not engine.scheduler.alive:
        return _failure(503, "The model thread has ended.")
    if streamed:
        return StreamingResponse(_stream(engine, job), media_type="text/event-stream")
    if not await _unless_gone(request, _finish(engine, job)):
        return Response(status_code=499)  # nobody reads it
    answers = [output.answer() for output in job.outputs]
    return JSONResponse(answers if job.several else answers[0])


async def _json(request: Request) -> dict[str, Any]:
    """The request's JSON object; an empty body is an empty object. Raises Malformed."""
    raw = await request.body()
    try:
        body = json.loads(raw or b"{}")
    except ValueError as error:
        raise Malformed(f"1 validation error: JSON decode error: {error}") from error
    if not isinstance(body, dict):
        raise Malformed(f"1 validation error: the body must be an object, got {type(body).__name__}")
    return cast(dict[str, Any], body)


@contextlib.asynccontextmanager
async def _running(engine: Engine, job: Job) -> AsyncGenerator[asyncio.Queue[tuple[int, Event]]]:
    """Start a job; its events arrive in the queue with the index of their output. Leaving early aborts it."""
    events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def emitter(index: int) -> Callable[[Event], None]:
        return lambda event: cast(None, loop.call_soon_threadsafe(events.put_nowait, (index, event)))

    rids = {output.rid for output in job.outputs}
    engine.rids |= rids
    for index, output in enumerate(job.outputs):
        engine.scheduler.submit(sequence_of(engine, output, job.choosers[index], emitter(index)))
    try:
        yield events
    finally:
        engine.rids -= rids
        for output in job.outputs:
            if output.finished is None:
                engine.scheduler.abort(output.rid)


async def _finish(engine: Engine, job: Job) -> None:
    async with _running(engine, job) as events:
        while any(output.finished is None for output in job.outputs):
            index, event = await events.get()
            job.outputs[index].hear(event)


async def _unless_gone(request: Request, work: Coroutine[None, None, None]) -> bool:
    """Run `work`, but end it when the client goes away; whether it was done."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.done()
    finally:
        for task in (working, watching):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # ours, of the line above
            await working


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(engine: Engine, job: Job) -> AsyncIterator[bytes]:
    """Server-sent events of a job; starlette cancels it when the client goes away."""
    async with _running(engine, job) as events:
        while any(output.finished is None for output in job.outputs):
            heard = [await events.get()]
            while not events.empty():  # a slow reader gets several tokens at once
                heard.append(events.get_nowait())
            for index, event in heard:
                job.outputs[index].hear(event)
            for index in sorted({index for index, _ in heard}):
                if job.outputs[index].worth_sending:
                    answer = job.outputs[index].answer()
                    yield _sse(answer | {"index": index} if job.several else answer)
    yield b"data: [DONE]\n\n"


async def _error_stream(refused: Refused) -> AsyncIterator[bytes]:
    error = {"message": str(refused), "type": "invalid_request_error", "code": 400, "retryable": False}
    yield _sse({"error": error})
    yield b"data: [DONE]\n\n"


def _sse(answer: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(answer, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _failure(status: int, message: str) -> JSONResponse:
    body = {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
    return JSONResponse(body, status_code=status)


async def _abort_request(engine: Engine, request: Request) -> Response:
    body = await _json(request)
    rid = body.get("rid")
    if body.get("abort_all"):
        engine.scheduler.abort("")
    elif rid and isinstance(rid, str):  # an empty rid would match all; SGLang ignores it
        engine.scheduler.abort(rid)
    return Response()


# ---------------------------------------------------------------------------------------------------- information


async def _health(engine: Engine, _request: Request) -> Response:
    return Response(status_code=200 if engine.scheduler.alive else 503)


async def _health_generate(engine: Engine, request: Request) -> Response:
    if not engine.scheduler.alive:
        return Response(status_code=503)
    probe = read_job(engine, {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
    await _unless_gone(request, _finish(engine, probe))
    return Response()


async def _model_info(engine: Engine, _request: Request) -> Response:
    return JSONResponse(
        {
            "model_path": str(engine.weights),
            "served_model_name": str(engine.weights),
            "tokenizer_path": str(engine.folder),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.scheduler.version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": engine.config.model_type,
            "architectures": engine.config.architectures,
        }
    )


async def _server_info(engine: Engine, _request: Request) -> Response:
    return JSONResponse(
        {
            "model_path": str(engine.folder),
            "tokenizer_path": str(engine.folder),
            "served_model_name": str(engine.folder),
            "context_length": engine.context_length,
            "max_total_num_tokens": engine.context_length,
            "max_req_input_len": engine.context_length - 1,
            "incremental_streaming_output": engine.incremental,
            "dtype": "float32",
            "device": "cpu",
            "weight_version": engine.scheduler.version,
            "vocab_size": engine.vocab_size,
            "startup_time": engine.started,
            "engine": "polar-train embedded",
            "version": version_of("polar-mitm"),
            "internal_states": [],
        }
    )


async def _models(engine: Engine, _request: Request) -> Response:
    card = {
        "id": str(engine.weights),
        "object": "model",
        "created": int(engine.started),
        "owned_by": "sglang",
        "root": str(engine.weights),
        "parent": None,
        "max_model_len": engine.context_length,
    }
    return JSONResponse({"object": "list", "data": [card]})


async def _tokenize(engine: Engine, request: Request) -> Response:
    body = await _json(request)
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise Malformed(f"1 validation error: prompt must be a string, got {prompt!r:.80}")
    ids = engine.tokenizer.encode(prompt, add_special_tokens=bool(body.get("add_special_tokens", True)))
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": engine.tokenizer.model_max_length})


async def _detokenize(engine: Engine, request: Request) -> Response:
    body = await _json(request)
    skip = bool(body.get("skip_special_tokens", True))
    ids = checked_ids(engine, body.get("tokens"))
    return JSONResponse({"text": engine.tokenizer.decode(ids.tolist(), skip_special_tokens=skip)})


# ---------------------------------------------------------------------------------------------------- control


async def _flush_cache(engine: Engine, _request: Request) -> Response:
    flushed = await asyncio.wrap_future(engine.scheduler.flush())
    said = "Cache flushed." if flushed else "Flush cache failed."
    hint = "(When there are running or waiting requests, the operation will not be performed.)"
    return PlainTextResponse(
        f"{said}\nPlease check backend logs for more details. {hint}\n", status_code=200 if flushed else 400
    )


async def _update_weights_from_disk(engine: Engine, request: Request) -> Response:
    body = await _json(request)
    path, version = body.get("model_path"), body.get("weight_version")
    if not isinstance(path, str):
        raise Malformed(f"1 validation error: model_path must be a string, got {path!r}")
    try:
        model = await asyncio.to_thread(engine.load_alike, Path(path))
    except (OSError, ValueError) as error:  # the old weights keep serving, and the client hears why
        answer = {"success": False, "message": f"Failed to load weights: {error}.", "num_paused_requests": 0}
        return JSONResponse(answer, status_code=400)
    abort = bool(body.get("abort_all_requests"))
    await asyncio.wrap_future(engine.scheduler.swap(model, version, abort=abort))
    engine.weights = Path(path)
    message = "Succeeded to update model weights."
    if version is not None:
        message += f" Weight version updated to {version}."
    return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})


async def _update_weight_version(engine: Engine, request: Request) -> Response:
    body = await _json(request)
    version = body.get("new_version")
    if not isinstance(version, str):
        raise Malformed(f"1 validation error: new_version must be a string, got {version!r}")
    abort = bool(body.get("abort_all_requests", True))
    await asyncio.wrap_future(engine.scheduler.set_version(version, abort=abort))
    answer = {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
    return JSONResponse(answer)


async def _weights_checker(engine: Engine, request: Request) -> Response:
    action = (await _json(request)).get("action", "checksum")
    if action != "checksum":
        return JSONResponse({"success": False, "message": f"Unsupported action={action!r}"}, status_code=400)
    model = await asyncio.wrap_future(engine.scheduler.weights())
    sums = await asyncio.to_thread(checksums, model)
    place = {"role": "target", "rank": 0, "size": 1}
    place |= {f"{kind}_{what}": int(what == "size") for kind in ("tp", "dp", "pp") for what in ("rank", "size")}
    part = {"checksums": sums, "per_gpu_checksum": overall(sums), "parallelism_info": [place]}
    answer = {"success": True, "message": "Success.", "ranks": [part]}
    return JSONResponse(answer | {"per_engine_checksum": sha256(overall(sums).encode()).hexdigest()})


async def _pause_generation(engine: Engine, request: Request) -> Response:
    mode = (await _json(request)).get("mode", "abort")
    if mode not in ("abort", "retract", "in_place"):
        raise Malformed(f"1 validation error: mode must be abort, retract or in_place, got {mode!r}")
    await asyncio.wrap_future(engine.scheduler.pause(mode))
    return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})


async def _continue_generation(engine: Engine, _request: Request) -> Response:
    await asyncio.wrap_future(engine.scheduler.resume())
    return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})
