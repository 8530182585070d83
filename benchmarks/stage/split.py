"""What each stage of a plain call costs by itself: the stages' own functions, called alone in this process.

Invariant: CPU of the whole process, threads included, over many calls; what the stages cost together in the proxy
beyond their sum is the gateway, the event loop and mitmproxy's second connection.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from benchmarks.stage.processes import Process
from polar_mitm.conversation import Conversation, Reply, Text
from polar_mitm.engine import SGLang
from polar_mitm.journal import Journal
from polar_mitm.sampling import Sampling
from polar_mitm.tokens import Reading, Template, load
from polar_mitm.turn import parse_body
from polar_mitm.wire import DIALECTS, Dialect
from polar_train.small_models import fetch

CALLS = 100


def split(words: Process, body: dict[str, Any], tokens: int) -> dict[str, float]:  # Any: JSON
    """CPU milliseconds of each stage of a Chat call whose answer has `tokens` tokens."""
    template = load(fetch("qwen3-tokenizer"))
    dialect = next(d for d in DIALECTS if d.name == "openai_chat")
    data = json.dumps(body).encode()
    request = dialect.decode(parse_body(data), {})
    prompt = template.render(request.messages, request.tools)
    output = np.full(tokens, template.encode(" word")[0], np.int32)
    return {
        "decode": _alone(lambda: dialect.decode(parse_body(data), {})),
        "tokens": _alone(lambda: _tokens(template, request, output)),
        "engine client": asyncio.run(_engine(words, prompt, tokens)),
        "journal": asyncio.run(_journal(prompt, output)),
        "encode": _alone(lambda: _encode(dialect, request, tokens)),
    }


def _tokens(template: Template, request: Conversation, output: np.ndarray[Any, Any]) -> None:  # Any: numpy
    reading = Reading(template, template.render(request.messages, request.tools), request.tools)
    reading.take(output)
    reading.finish()


def _encode(dialect: Dialect, request: Conversation, tokens: int) -> None:
    json.dumps(dialect.encode(request, Reply("a" * 30, (Text(" word" * tokens),), "length")))


async def _engine(words: Process, prompt: np.ndarray[Any, Any], tokens: int) -> float:  # Any: numpy
    engine = SGLang(f"http://127.0.0.1:{words.port}")
    await engine.describe()
    applied = Sampling(max_new_tokens=tokens).applied(Conversation("m", ()).sampling, 1000, (), "")

    async def call() -> None:
        async for _ in engine.generate(prompt, applied, uuid4().hex):
            pass

    cost = await _each(call)
    await engine.close()
    return cost


async def _journal(prompt: np.ndarray[Any, Any], output: np.ndarray[Any, Any]) -> float:  # Any: numpy
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.open(Path(folder) / "run")

        async def call() -> None:
            begun = journal.begin({"call_id": uuid4().hex[:20], "messages": "x" * 500, "prompt_suffix": prompt})
            logprobs = np.zeros(len(output), np.float32)
            done = {"status": "completed", "output_ids": output, "logprobs": logprobs, "answer": "x" * 500}
            await journal.finish([begun | done])

        cost = await _each(call)
        await journal.close()
    return cost


async def _each(call: Callable[[], Awaitable[None]]) -> float:
    await call()
    began = time.process_time()
    for _ in range(CALLS):
        await call()
    return (time.process_time() - began) / CALLS * 1e3


def _alone(work: Callable[[], object]) -> float:
    work()
    began = time.process_time()
    for _ in range(CALLS):
        work()
    return (time.process_time() - began) / CALLS * 1e3
