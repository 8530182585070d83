"""Which session a call belongs to, which earlier call it continues, and what kind of call it is.

Invariant: a call is attached to a parent only when its history equals the parent's history and reply (see
`conversation.canonical`); an echoed id says which of several equal candidates is meant, it never attaches by itself.
This module renders nothing and knows no protocol; it reads and writes only the run folder's `key` and `sessions.jsonl`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from polar_mitm.conversation import Conversation, history_keys, tools_key
from polar_mitm.errors import Unauthorized

Tokens = NDArray[np.int32]
Kind = Literal["agent", "subagent", "compaction", "auxiliary", "foreign"]
Evidence = Literal["pointer", "history"]
RootReason = Literal["first", "edited_history", "tools_changed", "bridge_refused", "unknown_history"]

DEFAULT_SESSION = "default"
CALL_ID_LENGTH = 20
_CORE = re.compile(r"([a-z2-7]{20})([0-9a-f]{2})([a-z2-7]{8})")
_SESSION_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


# --- minted ids ---------------------------------------------------------------------------------------------------


def new_call_id() -> str:
    """A fresh call id: 20 characters, 100 random bits."""
    return base64.b32encode(secrets.token_bytes(13)).decode().lower()[:CALL_ID_LENGTH]


def mint(key: bytes, session_id: str, call_id: str, choice: int = 0) -> str:
    """The 30-character core of every id of an answer: call id, choice, and a MAC over session, call and choice."""
    return f"{call_id}{choice:02x}{_mac(key, session_id, call_id, choice)}"


def read_pointer(key: bytes, session_id: str, text: str) -> tuple[str, int] | None:
    """The (call id, choice) named by an echoed id, or None when the id is not ours, forged, or of another session.

    The core may stand anywhere in the id: Gemini CLI puts a tool name before it, other harnesses a prefix.
    """
    for call_id, choice, mac in _CORE.findall(text):
        if compare_digest(mac, _mac(key, session_id, call_id, int(choice, 16))):
            return call_id, int(choice, 16)
    return None


def _mac(key: bytes, session_id: str, call_id: str, choice: int) -> str:
    digest = blake2b(f"{session_id}\0{call_id}\0{choice}".encode(), key=key, digest_size=5).digest()
    return base64.b32encode(digest).decode().lower()


def load_key(run: Path) -> bytes:
    """The run's MAC key, made at the first call; survives a restart. File `key`, mode 0600."""
    path = run / "key"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path.read_bytes()
    with os.fdopen(descriptor, "wb") as file:
        file.write(key := secrets.token_bytes(32))
    return key


# --- sessions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Session:
    """One harness run."""

    session_id: str
    group_id: str | None = None
    registered: bool = False
    """Whether the run knows it by a secret; the sessions of an interactive run are only names."""


def register(run: Path, session_id: str, group_id: str | None = None) -> str:
    """Register a session and return its secret; the same secret when it is registered already.

    Raises ValueError for a name that cannot stand in a proxy URL, or that is registered in another group.
    """
    if not _SESSION_NAME.fullmatch(session_id):
        raise ValueError(f"session name {session_id!r}: use 1 to 100 letters, digits, '.', '_' or '-'")
    known = _read_sessions(run).get(session_id)
    if known:
        if known["group_id"] != group_id:
            raise ValueError(f"session {session_id!r} is registered in group {known['group_id']!r}, not {group_id!r}")
        return str(known["secret"])
    secret = secrets.token_urlsafe(18)
    line = {
        "session_id": session_id,
        "secret": secret,
        "group_id": group_id,
        "registered": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    descriptor = os.open(run / "sessions.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(json.dumps(line).encode() + b"\n")
    return secret


class Sessions:
    """The registered sessions of a run; a registration by another process is seen at the next look-up."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen = -1
        self._sessions: dict[str, dict[str, Any]] = {}

    def identify(self, name: str | None, secret: str | None) -> Session:
        """The session that these credentials belong to.

        When none is registered, the run is interactive: any name is taken as it is, no name is the default session.
        Raises Unauthorized for an unknown session or a wrong secret of a run with registered sessions.
        """
        self._refresh()
        if not self._sessions:
            return Session(name or DEFAULT_SESSION)
        known = self._sessions.get(name or "")
        if known is None or not compare_digest(str(known["secret"]).encode(), (secret or "").encode()):
            raise Unauthorized(
                f"session {name!r} is not registered in this run, or its secret is wrong: "
                "take the environment from `polar-toolkit env RUN --session NAME`"
            )
        return Session(str(known["session_id"]), known["group_id"], registered=True)

    def _refresh(self) -> None:
        path = self._run / "sessions.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._seen:
            self._sessions, self._seen = _read_sessions(self._run), size


def _read_sessions(run: Path) -> dict[str, dict[str, Any]]:
    path = run / "sessions.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["session_id"]: line for line in map(json.loads, lines)}


# --- kinds --------------------------------------------------------------------------------------------------------


class Fingerprints:
    """Tells a registered session's harness from other programs with its credentials (the agent's shell inherits them).

    A session of an interactive run is nobody's in particular: a user may run one harness after the other in it.
    """

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def kind(self, session: Session, headers: Mapping[str, str]) -> Kind:
        """The kind of a call, from the evidence of its request headers (names in lower case)."""
        product = headers.get("user-agent", "").split("/", 1)[0].strip().lower()
        if session.registered and self._first.setdefault(session.session_id, product) != product:
            return "foreign"
        if headers.get("x-claude-code-request-class") == "compaction":  # Claude Code 2.1.332
            return "compaction"
        return "subagent" if headers.get("x-claude-code-agent-id") else "agent"


# --- parents ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tip:
    """A finished call that a later call may continue."""

    call_id: str
    choice: int
    prompt_ids: Tokens
    output_ids: Tokens
    history_key: bytes
    """Key of the history up to and including this call's reply."""
    tools_key: bytes
    body: dict[str, Any] | None = None  # Any: the request body as JSON
    """The whole request body, to store a child's body as a difference; None when reloaded from the journal."""

    @property
    def tokens(self) -> int:
        """Length of prompt and output together."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class Parent:
    """The call that a request continues, and how much of its history that covers."""

    tip: Tip
    evidence: Evidence
    messages: int
    """How many leading messages of the request are the parent's history and reply."""


class Tips:
    """The calls that may be continued, newest kept, bounded by the number of tokens they hold."""

    def __init__(self, max_tokens: int = 50_000_000) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._tips: OrderedDict[tuple[str, str, int], Tip] = OrderedDict()
        self._by_history: dict[tuple[str, bytes], list[tuple[str, str, int]]] = {}

    def add(self, session_id: str, tip: Tip) -> None:
        """Make a finished call available as a parent. Adding it again changes nothing."""
        key = (session_id, tip.call_id, tip.choice)
        if key in self._tips:
            return
        self._tips[key] = tip
        self._by_history.setdefault((session_id, tip.history_key), []).append(key)
        self._tokens += tip.tokens
        while self._tokens > self._max_tokens and len(self._tips) > 1:
            self._forget(*self._tips.popitem(last=False))

    def knows(self, session_id: str, call_id: str, choice: int) -> bool:
        """Whether this call is in memory."""
        return (session_id, call_id, choice) in self._tips

    def find(self, session_id: str, request: Conversation, pointers: Iterable[tuple[str, int]]) -> Parent | RootReason:
        """The parent of a request, or the reason why it is a root."""
        last = max((i for i, m in enumerate(request.messages) if m.role == "assistant"), default=-1)
        if last < 0:
            return "first"
        keys = history_keys(request.messages[: last + 1])
        named = [(session_id, *pointer) for pointer in pointers]
        equal = self._by_history.get((session_id, keys[last]), [])
        if not equal:
            seen = any((session_id, key) in self._by_history for key in keys)
            return "edited_history" if seen or any(n in self._tips for n in named) else "unknown_history"
        pointed = [n for n in named if n in equal]
        tip = self._tips[pointed[-1] if pointed else equal[-1]]
        if tip.tools_key != tools_key(request.tools):
            return "tools_changed"
        return Parent(tip, "pointer" if pointed else "history", last + 1)

    def _forget(self, key: tuple[str, str, int], tip: Tip) -> None:
        self._tokens -= tip.tokens
        equal = self._by_history[key[0], tip.history_key]
        equal.remove(key)
        if not equal:
            del self._by_history[key[0], tip.history_key]
