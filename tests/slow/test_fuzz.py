"""Twenty thousand spoiled requests: each gets an answer of its protocol, in time, and no secret reaches the disk."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_mitm.desk import Desk
from polar_mitm.engine import Description, Sample, Span, Tokens
from polar_mitm.gateway import Gateway
from polar_mitm.journal import Journal, read_calls
from polar_mitm.sampling import Sampling
from polar_mitm.tokens import Template
from tests.slow.mutations import Spoiled, spoiled

pytestmark = pytest.mark.slow

REQUESTS = 20_000
PARALLEL = 32
SECRET = "sk-planted-0123456789abcdef"
HEADERS = {
    "authorization": f"Bearer {SECRET}", "x-api-key": SECRET, "x-goog-api-key": SECRET, "cookie": f"session={SECRET}",
    "proxy-authorization": f"Basic {SECRET}", "content-type": "application/json", "host": "api.example.org",
}  # fmt: skip
ENDINGS = {
    "openai_chat": (b"data: [DONE]", b'data: {"error"'),
    "openai_responses": (b"event: response.completed", b"event: response.incomplete", b"event: response.failed"),
    "anthropic": (b"event: message_stop", b"event: error"),
    "gemini": (b'"finishReason"', b'"error"'),
}


class Hello:
    """An engine in this process that always says the same five tokens; scripted, since what is tested is before it."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, np.int32)

    async def describe(self) -> Description:
        """A large context, so that few requests overflow."""
        return Description("hello", 1_000_000, "v1")

    async def check_tokenizer(self, ids: Sequence[int], vocabulary: int) -> None:
        """Any."""

    async def generate(self, prompt: Tokens, sampling: dict[str, Any], rid: str) -> AsyncGenerator[Sample]:
        """The same for everybody."""
        ids = self._ids[: sampling["max_new_tokens"]]
        stop = {"type": "stop"} if len(ids) == len(self._ids) else {"type": "length"}
        yield Sample(ids, np.full(len(ids), -0.5, np.float32), stop, (Span(0, len(ids), "v1"),))

    async def abort(self, rid: str) -> None:
        """Nothing to stop."""


@dataclass(slots=True)
class Answered:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    ended: bool = False


async def ask(gateway: Gateway, request: Spoiled) -> Answered:
    """One request over ASGI, as uvicorn would hand it in."""
    answered = Answered()
    headers = HEADERS | ({"content-encoding": request.encoding} if request.encoding else {})
    scope = {
        "type": "http", "method": "POST", "path": request.path, "query_string": f"alt=sse&key={SECRET}".encode(),
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }  # fmt: skip
    waiting = asyncio.Event()
    messages = iter([{"type": "http.request", "body": request.body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in messages:
            return message
        await waiting.wait()  # the client stays
        raise AssertionError

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answered.status = message["status"]
            answered.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        else:
            answered.body += message.get("body", b"")
            answered.ended = not message.get("more_body", False)

    await asyncio.wait_for(gateway(scope, receive, send), 20)
    return answered


def complaint(request: Spoiled, answered: Answered) -> str | None:
    """What is wrong with an answer."""
    if not answered.ended:
        return "the answer has no end"
    if answered.status == 200 and answered.headers["content-type"].startswith("text/event-stream"):
        last = answered.body.rstrip().rpartition(b"\n\n")[2]
        return None if any(mark in last for mark in ENDINGS[request.dialect]) else f"no terminal event: {last!r}"
    value = json.loads(answered.body)
    if answered.status == 200:
        return None
    if answered.status >= 500:
        return f"{answered.status}: {value}"
    error = value["error"]
    shape = {
        "openai_chat": {"message", "type", "param", "code"}, "openai_responses": {"message", "type", "param", "code"},
        "anthropic": {"type", "message"}, "gemini": {"code", "message", "status"},
    }[request.dialect]  # fmt: skip
    if not shape <= error.keys() or not isinstance(error["message"], str) or not error["message"]:
        return f"not the provider's error shape: {value}"
    return None if SECRET not in error["message"] else "the secret is in the error"


async def run(folder: Path, template: Template) -> tuple[Counter[int], list[str]]:
    """All requests, some at a time; statuses, and what was wrong."""
    journal = Journal.open(folder)
    reply = template.encode("Hello to you, stranger.<|im_end|>")
    desk = Desk(folder, "run", engine=Hello(reply), template=template, journal=journal, sampling=Sampling(), wait=1.0)
    gateway, statuses, wrong = Gateway(desk, ""), Counter[int](), list[str]()
    numbers = iter(range(REQUESTS))

    async def work() -> None:
        for number in numbers:
            request = spoiled(number)
            try:
                answered = await ask(gateway, request)
                problem = complaint(request, answered)
                statuses[answered.status] += 1
            except Exception as error:  # noqa: BLE001 - any exception at all is what this test looks for
                problem = f"{error!r}"
            if problem:
                wrong.append(f"request {number} ({request.dialect}, {request.body[:200]!r}): {problem}")

    await asyncio.gather(*(work() for _ in range(PARALLEL)))
    await desk.close()
    await journal.close()
    return statuses, wrong


def test_spoiled_requests_are_answered_in_shape(
    qwen3: Template, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No unhandled exception, no hang, no answer out of shape, and the planted secret in no file of the run."""
    with caplog.at_level(logging.ERROR):
        statuses, wrong = asyncio.run(run(tmp_path / "run", qwen3))
    print(
        f"{REQUESTS:,} spoiled requests over {len(ENDINGS)} protocols: {dict(statuses)}, {len(wrong)} answered wrongly"
    )
    assert not wrong, "\n".join(wrong[:10])
    assert not caplog.records
    assert statuses[200] > REQUESTS / 20
    assert statuses[400] > REQUESTS / 5
    assert not [p for p in (tmp_path / "run").rglob("*") if p.is_file() and SECRET.encode() in p.read_bytes()]
    assert SECRET not in str(read_calls(tmp_path / "run").to_pylist())
