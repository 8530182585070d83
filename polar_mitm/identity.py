"""Which session a call belongs to, and the ids that harnesses must echo.

Invariant: an id is believed only with its MAC over session, call and choice; tool output could forge any other.
This module renders nothing and knows no protocol; it reads and writes only the run folder's `key` and `sessions.jsonl`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import time
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import Any, Literal

from polar_mitm.errors import Unauthorized

Kind = Literal["agent", "subagent", "compaction", "auxiliary", "foreign"]

DEFAULT_SESSION = "default"
CALL_ID_LENGTH = 20
_LONGEST_ID = 512
"""Characters of an echoed field in which an id of ours begins: it stands first, behind a prefix or a tool's name."""
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
    for call_id, choice, mac in _CORE.findall(text[:_LONGEST_ID]):
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


def register(run: Path, session_id: str, group_id: str | None = None, *, mode: str = "", address: str = "") -> str:
    """Register a session and return its secret; the same secret when it is registered already.

    A harness that bears no secret may be known by the proxy mode that it comes through (`mode`, as it is given to
    `mitmdump --mode`, such as regular@8081) or by the IP address that it comes from.

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
        **({"mode": mode} if mode else {}),
        **({"address": address} if address else {}),
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

    def identify(self, name: str | None, secret: str | None, *, mode: str = "", address: str = "") -> Session:
        """The session that these credentials belong to; without any, the one of this proxy mode or this address.

        When none is registered, the run is interactive: any name is taken as it is, no name is the default session.
        Raises Unauthorized for an unknown session or a wrong secret of a run with registered sessions.
        """
        self._refresh()
        if not self._sessions:
            return Session(name or DEFAULT_SESSION)
        if name is None and (placed := self._placed(mode, address)):
            return placed
        known = self._sessions.get(name or "")
        if known is None or not compare_digest(str(known["secret"]).encode(), (secret or "").encode()):
            raise Unauthorized(
                f"session {name!r} is not registered in this run, or its secret is wrong: "
                "take the environment from `polar-toolkit env RUN --session NAME`"
            )
        return Session(str(known["session_id"]), known["group_id"], registered=True)

    def registered(self, name: str) -> bool:
        """Whether the run knows a session of this name."""
        self._refresh()
        return name in self._sessions

    def _placed(self, mode: str, address: str) -> Session | None:
        for known in self._sessions.values():
            if (mode and known.get("mode") == mode) or (address and known.get("address") == address):
                return Session(str(known["session_id"]), known["group_id"], registered=True)
        return None

    def _refresh(self) -> None:
        path = self._run / "sessions.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._seen:
            self._sessions, self._seen = _read_sessions(self._run), size


def _read_sessions(run: Path) -> dict[str, dict[str, Any]]:
    path = run / "sessions.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["session_id"]: line for line in map(json.loads, lines)}
