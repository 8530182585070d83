"""The columns of a call's row, as far as the request and its prompt determine them. Pure.

Invariant: no credential, cookie or query string is in a row; what a request shares with its parent is not stored again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from polar_mitm.conversation import Conversation, message_json, tools_key
from polar_mitm.errors import PolarError
from polar_mitm.identity import Session
from polar_mitm.journal import Outline, shrink
from polar_mitm.rows import token_hash
from polar_mitm.tips import Parent, RootReason
from polar_mitm.tokens import Tokens
from polar_mitm.wire import Dialect

Row = dict[str, Any]  # Any: a column's value, typed by rows.SCHEMA


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as the gateway hands it over: its session is known, its credentials are gone."""

    dialect: Dialect
    session: Session
    host: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    """Decompressed."""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Any: JSON
    """What the route read from path and query: it joins the fields of the body."""


def first_row(run_id: str, incoming: Incoming, call_id: str, now_ns: int) -> Row:
    """What is known before the body is read."""
    return {
        "run_id": run_id,
        "call_id": call_id,
        "choice": 0,
        "session_id": incoming.session.session_id,
        "group_id": incoming.session.group_id,
        "dialect": incoming.dialect.name,
        "host": incoming.host,
        "path": incoming.path,
        "user_agent": incoming.headers.get("user-agent"),
        "began_ns": now_ns,
    }


def request_row(request: Conversation) -> Row:
    """What the decoded request says."""
    return {
        "model": _storable(request.model),
        "stream": request.stream,
        "thread_id": None if request.thread is None else _storable(request.thread),
        "sampling_asked": json.dumps(asdict(request.sampling) | {"forced_tool": request.forced_tool}),
        "fidelity": [_storable(name) for name in request.fidelity],
        "tools_key": tools_key(request.tools),
    }


def _storable(text: str) -> str:
    """Half characters, which JSON text can carry and UTF-8 cannot, as question marks."""
    return text.encode("utf-8", "replace").decode()


def prompt_row(
    prompt: Tokens, parent: Parent | None, root: RootReason | None, request: Conversation, body: dict[str, Any],
    *, marks: Outline | None = None,
) -> Row:  # fmt: skip
    """The prompt, and what of history, tools and body the parent does not hold already; `marks` outline the body."""
    shared = parent.tip.tokens if parent else 0
    known = parent.messages if parent else 0
    return {
        "parent_call_id": parent.tip.call_id if parent else None,
        "parent_choice": parent.tip.choice if parent else None,
        "parent_evidence": parent.evidence if parent else None,
        "root_reason": root,
        "prompt_len": len(prompt),
        "prompt_shared": shared,
        "prompt_suffix": prompt[shared:].copy(),  # a view would keep the whole prompt as long as the row
        "prompt_hash": token_hash(prompt),
        "messages": json.dumps([message_json(m) for m in request.messages[known:]]),
        "tools": None if parent else json.dumps([asdict(t) for t in request.tools]),
        "request": json.dumps(shrink(body, parent.tip.outline if parent else None, marks)),
    }


def refused_row(error: PolarError, body: bytes) -> Row:
    """What a request that never reached the engine adds: the whole body, and why."""
    return {
        "status": "refused",
        "untrainable_reason": "failed",
        "error_kind": error.kind,
        "error": str(error),
        "request": json.dumps(body.decode("utf-8", "replace")),
    }
