"""Bodies, answers, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from polar_mitm.asgi import Gone, Receive, Scope, listen, read_body, send_json, until_gone
from polar_mitm.compression import LARGEST_BODY
from polar_mitm.errors import TooLarge


def receiving(*messages: Scope) -> Receive:
    """A client that sends these, and then nothing."""
    left = iter(messages)

    async def receive() -> Scope:
        for message in left:
            return message
        return await asyncio.Future()

    return receive


def part(body: bytes, *, more: bool = False) -> Scope:
    return {"type": "http.request", "body": body, "more_body": more}


LEFT: Scope = {"type": "http.disconnect"}


def test_a_body_may_come_in_parts() -> None:
    """They are put together."""
    assert asyncio.run(read_body(receiving(part(b"a", more=True), part(b"b")))) == b"ab"


def test_a_client_that_leaves_in_its_request_is_gone() -> None:
    """Nobody is left to be told."""
    with pytest.raises(Gone):
        asyncio.run(read_body(receiving(part(b"a", more=True), LEFT)))


def test_a_body_over_the_bound_is_refused_before_its_end() -> None:
    """However much more would come."""
    big = part(bytes(LARGEST_BODY // 2 + 1), more=True)
    with pytest.raises(TooLarge):
        asyncio.run(read_body(receiving(big, big)))


def test_work_runs_to_its_end_while_the_client_stays() -> None:
    """And what it raises is raised."""
    done: list[str] = []

    async def work() -> None:
        done.append("it")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(until_gone(work(), receiving()))
    assert done == ["it"]


def test_work_ends_when_the_client_leaves() -> None:
    """At its next await."""
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Future()
        finally:
            ended.append("it")

    asyncio.run(until_gone(work(), receiving(LEFT)))
    assert ended == ["it"]


def test_half_a_character_is_no_fault() -> None:
    """JSON can carry what UTF-8 cannot: a question mark goes out."""
    sent: list[Any] = []

    async def send(message: Scope) -> None:
        sent.append(message)

    asyncio.run(send_json(send, 200, {"a": "\ud800"}))
    start, body = sent
    assert json.loads(body["body"]) == {"a": "?"}
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()


def test_a_connection_sends_small_pieces_at_once() -> None:
    """The second of two deltas does not wait until the first is acknowledged, which takes up to 40 ms."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
