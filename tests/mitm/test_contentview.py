"""The view of a call, part by part; test_addon looks at it in a real mitmweb."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from mitmproxy import http
from mitmproxy.contentviews import Metadata

from tests.mitm.protocols import EVERY, Protocol

with warnings.catch_warnings():  # mitmproxy 12.2.3 uses names that pyparsing deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from mitmproxy.test import tflow

    from polar_mitm.contentview import CALL, PolarContentview

ROW: dict[str, Any] = {
    "call_id": "c1", "session_id": "alice", "kind": "agent", "status": "completed", "prompt_len": 9,
    "output_ids": [65, 200], "logprobs": [-0.5, -1.25], "trainable": False, "untrainable_reason": "foreign",
    "reply": json.dumps(
        [
            {"kind": "reasoning", "text": "Hm."},
            {"kind": "text", "text": "Hello."},
            {"kind": "toolcall", "id": "call_1", "name": "run", "arguments": '{"command": "ls"}', "custom": False},
        ]
    ),
}  # fmt: skip
VIEW = PolarContentview({"c1": ROW}.get, lambda token: bytes([token]))


def seen(message: http.Message, flow: http.HTTPFlow) -> Metadata:
    return Metadata(flow=flow, http_message=message)


def call(path: str, body: Any, *, call_id: str = "c1") -> http.HTTPFlow:
    """The flow of a call that was answered."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    flow = tflow.tflow(req=http.Request.make("POST", f"https://api.example.org{path}", content), resp=True)
    flow.metadata[CALL] = call_id
    return flow


@pytest.mark.parametrize("protocol", EVERY, ids=lambda p: p.name)
def test_a_request_is_shown_as_a_conversation(protocol: Protocol) -> None:
    """Whatever its protocol: model, tools, and each message under its role."""
    flow = call(protocol.path, protocol.ask("Look."))
    text = VIEW.prettify(flow.request.content or b"", seen(flow.request, flow))
    assert text == "[model] some-model\n\n[tools] run\n\n[user]\nLook."


def test_a_refused_request_is_shown_with_its_reason() -> None:
    """And as it came."""
    flow = call("/v1/messages", b"{")
    text = VIEW.prettify(b"{", seen(flow.request, flow))
    assert text.startswith("refused: ")
    assert text.endswith("{")


def test_an_answer_is_shown_with_its_parts_and_its_tokens() -> None:
    """A token that is no character of its own is shown by its bytes."""
    flow = call("/v1/messages", {})
    assert flow.response
    assert VIEW.prettify(b"{}", seen(flow.response, flow)).split("\n\n") == [
        "call c1, session alice, agent: completed\n9 prompt tokens, 2 sampled, not trained: foreign",
        "<thinking> Hm.",
        "Hello.",
        '<call> run {"command": "ls"}  (call_1)',
        "   token   logprob\n      65   -0.5000  'A'\n     200   -1.2500  '\\\\xc8'",
    ]


def test_an_answer_whose_row_is_gone_is_shown_as_it_is() -> None:
    """Only the last rows are kept."""
    flow = call("/v1/messages", {}, call_id="c2")
    assert flow.response
    assert VIEW.prettify(b"plain", seen(flow.response, flow)) == "plain"


def test_the_view_is_for_calls_only() -> None:
    """Anything else keeps the view it had."""
    flow = call("/v1/messages", {})
    other = tflow.tflow()
    assert VIEW.render_priority(b"x", seen(flow.request, flow)) > 1
    assert VIEW.render_priority(b"", seen(flow.request, flow)) < 0
    assert VIEW.render_priority(b"x", seen(other.request, other)) < 0
    with pytest.raises(ValueError, match="not a model call"):
        VIEW.prettify(b"x", seen(other.request, other))
