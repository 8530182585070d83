"""What a request leaves in its row, and what it must not leave."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from polar_mitm.conversation import Conversation, Message, Text, Tool, history_keys, tools_key
from polar_mitm.errors import BadRequest
from polar_mitm.identity import Session
from polar_mitm.journal import outline
from polar_mitm.journal.packing import pack, to_table
from polar_mitm.record import Incoming, first_row, prompt_row, refused_row, request_row
from polar_mitm.rows import SCHEMA, token_hash
from polar_mitm.tips import Parent, Tip
from polar_mitm.wire import DIALECTS

ASKED = Message("user", (Text("hi"),))
SAID = Message("assistant", (Text("hello"),))
MORE = Message("user", (Text("more"),))
TOOL = Tool("run", "runs", "{}")
BODY: dict[str, Any] = {"model": "m", "messages": ["hi"], "store": True}
PARENT = Parent(
    Tip(
        "one", 0, np.array([1, 2], np.int32), np.array([3], np.int32), history_keys((ASKED, SAID))[-1],
        tools_key((TOOL,)), outline(BODY),
    ),
    "pointer",
    2,
)  # fmt: skip
PROMPT = np.array([1, 2, 3, 4], np.int32)


def incoming(**headers: str) -> Incoming:
    return Incoming(DIALECTS[0], Session("s", "g"), "api.example.org", "/v1/responses", headers, b"{}")


def test_no_credential_is_in_a_row() -> None:
    """Headers are read for the user agent only: no key, cookie, token or query can be written."""
    secret = "sk-secret-value"
    headers = dict.fromkeys(("authorization", "x-api-key", "cookie", "x-goog-api-key", "x-other"), secret)
    request = Conversation("m", (ASKED,), (TOOL,))
    row = first_row("run", incoming(**headers), "one", 1) | request_row(request)
    row |= prompt_row(PROMPT, None, "first", request, BODY)
    assert secret not in str(to_table([pack(row)]).to_pylist())


def test_the_first_row_says_whose_call_it_is_and_where_it_came_in() -> None:
    """Known before the body is read."""
    row = first_row("run", incoming(**{"user-agent": "codex_exec/0.171.0"}), "one", 17)
    assert row == {
        "run_id": "run", "call_id": "one", "choice": 0, "session_id": "s", "group_id": "g", "began_ns": 17,
        "dialect": "openai_responses", "host": "api.example.org", "path": "/v1/responses",
        "user_agent": "codex_exec/0.171.0",
    }  # fmt: skip


def test_every_name_in_a_row_is_a_column() -> None:
    """The pieces of a row fit the table."""
    request = Conversation("m", (ASKED,), (TOOL,), thread="t", fidelity=("store",))
    row = first_row("run", incoming(), "one", 1) | request_row(request)
    row |= prompt_row(PROMPT, None, "first", request, BODY) | refused_row(BadRequest("no"), b"{}")
    assert row.keys() <= set(SCHEMA.names)


def test_a_root_stores_its_whole_prompt_history_tools_and_body() -> None:
    """Nothing is shared when there is no parent."""
    row = prompt_row(PROMPT, None, "first", Conversation("m", (ASKED,), (TOOL,)), BODY)
    assert row["prompt_suffix"].tolist() == [1, 2, 3, 4]
    assert (row["prompt_len"], row["prompt_shared"], row["root_reason"]) == (4, 0, "first")
    assert [m["role"] for m in json.loads(row["messages"])] == ["user"]
    assert json.loads(row["tools"])[0]["name"] == "run"
    assert json.loads(row["request"]) == BODY


def test_a_child_stores_only_what_its_parent_lacks() -> None:
    """A session costs O(its length): suffix, new messages, new items of the body."""
    request = Conversation("m", (ASKED, SAID, MORE), (TOOL,))
    row = prompt_row(PROMPT, PARENT, None, request, BODY | {"messages": ["hi", "hello", "more"]})
    assert row["prompt_suffix"].tolist() == [4]
    assert (row["prompt_len"], row["prompt_shared"], row["root_reason"]) == (4, 3, None)
    assert (row["parent_call_id"], row["parent_choice"], row["parent_evidence"]) == ("one", 0, "pointer")
    assert [m["parts"][0]["text"] for m in json.loads(row["messages"])] == ["more"]
    assert row["tools"] is None
    assert json.loads(row["request"])["messages"] == ["hello", "more"]


def test_the_hash_covers_the_whole_prompt() -> None:
    """A prompt put together again is checked against it."""
    row = prompt_row(PROMPT, PARENT, None, Conversation("m", (ASKED, SAID, MORE)), BODY)
    assert row["prompt_hash"] == token_hash(PROMPT)


def test_a_refused_request_says_why() -> None:
    """A call that never reached the engine keeps its body, whatever its bytes."""
    row = refused_row(BadRequest("messages: missing"), b'{"a":\xff}')
    assert (row["status"], row["error_kind"], row["error"]) == ("refused", "bad_request", "messages: missing")
    assert json.loads(row["request"]) == '{"a":\ufffd}'


def test_what_the_harness_asked_for_is_kept() -> None:
    """Beside what was applied, as a column."""
    row = request_row(Conversation("m", (ASKED,), thread="t", stream=True, fidelity=("store",)))
    assert (row["model"], row["thread_id"], row["stream"], row["fidelity"]) == ("m", "t", True, ["store"])
    assert json.loads(row["sampling_asked"])["temperature"] is None
