"""Which session a call belongs to, and the ids that harnesses must echo.

Invariant: an id is believed only with its MAC over session, call and choice; tool output could forge any other. What
was written of a session is never written anew: `sessions.jsonl` is a log, in which a later line adds to an earlier one.
This module renders nothing and knows no protocol; it reads and writes only the run folder's `key` and `sessions.jsonl`.
"""

from __future__ import annotations

import base64
import fcntl
import hmac
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
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
_FILE = "sessions.jsonl"
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


def figures_token(key: bytes) -> str:
    """What opens the gateway's figures to a runner on this machine: made of the run's key, and no way back to it."""
    return hmac.digest(key, b"polar figures", "sha256").hex()


# --- sessions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Session:
    """One harness run."""

    session_id: str
    group_id: str | None = None
    registered: bool = False
    """Whether the run knows it by a secret; the sessions of an interactive run are only names."""
    turns: int | None = None
    """How many turns it may take; None: as many as it likes."""
    tokens: int | None = None
    """How many tokens may be sampled for it."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts that are passed through for it, besides the run's; `*.NAME` for all below one."""
    sealed: bool = False
    """Whether it is over: what still comes in its name is a straggler."""


def register(
    run: Path, session_id: str, group_id: str | None = None, *, mode: str = "", address: str = "",
    turns: int | None = None, tokens: int | None = None, allow_hosts: Sequence[str] = (),
) -> str:  # fmt: skip
    """Register a session and return its secret; the same secret when it is registered already, whose terms then stand.

    A harness that bears no secret may be known by the proxy mode that it comes through (`mode`, as it is given to
    `mitmdump --mode`, such as regular@8081) or by the IP address that it comes from. `turns`, `tokens` and
    `allow_hosts`: see `Session`.

    Raises ValueError for a name that cannot stand in a proxy URL, or that is registered in another group.
    """
    if not _SESSION_NAME.fullmatch(session_id):
        raise ValueError(f"session name {session_id!r}: use 1 to 100 letters, digits, '.', '_' or '-'")
    with _writing(run) as log:
        known = log.sessions.get(session_id)
        if known is None:
            secret = secrets.token_urlsafe(18)
            terms = {"mode": mode, "address": address, "turns": turns, "tokens": tokens, "allow_hosts": [*allow_hosts]}
            line = {"session_id": session_id, "secret": secret, "group_id": group_id}
            line |= {name: value for name, value in terms.items() if value or value == 0}
            log.append(line | {"registered": _now()})
            return secret
    if known.session.group_id != group_id:
        raise ValueError(f"session {session_id!r} is registered in group {known.session.group_id!r}, not {group_id!r}")
    return known.secret


def seal(run: Path, session_id: str) -> None:
    """End a session: from its next call on it is refused, also by a gateway that is started later. Durable on return.

    Raises ValueError for a session that is not registered.
    """
    with _writing(run) as log:
        known = log.sessions.get(session_id)
        if known is None:
            raise ValueError(f"session {session_id!r} is not registered in {run}: it cannot be sealed")
        if not known.session.sealed:
            log.append({"session_id": session_id, "sealed": _now()}, durable=True)


class Sessions:
    """The registered sessions of a run; what another process registers or seals is seen at the next look-up."""

    def __init__(self, run: Path) -> None:
        self._log = _Log(run)

    def identify(self, name: str | None, secret: str | None, *, mode: str = "", address: str = "") -> Session:
        """The session that these credentials belong to; without any, the one of this proxy mode or this address.

        When none is registered, the run is interactive: any name is taken as it is, no name is the default session.
        Raises Unauthorized for an unknown session or a wrong secret of a run with registered sessions.
        """
        self._log.read_on()
        if not self._log.sessions:
            return Session(name or DEFAULT_SESSION)
        if name is None and (placed := self._log.placed(mode, address)):
            return placed
        known = self._log.sessions.get(name or "")
        if known is None or not compare_digest(known.secret.encode(), (secret or "").encode()):
            raise Unauthorized(
                f"session {name!r} is not registered in this run, or its secret is wrong: "
                "take the environment from `polar-toolkit env RUN --session NAME`"
            )
        return known.session

    def registered(self, name: str) -> bool:
        """Whether the run knows a session of this name."""
        self._log.read_on()
        return name in self._log.sessions


@dataclass(frozen=True, slots=True)
class _Known:
    session: Session
    secret: str


class _Log:
    """What sessions.jsonl says, as far as it was read: only what was appended since is read again."""

    def __init__(self, run: Path) -> None:
        self._path = run / _FILE
        self._file, self._read = -1, 0
        self.sessions: dict[str, _Known] = {}
        self._places: dict[tuple[str, str], str] = {}

    def read_on(self) -> None:
        """Take up the lines that were completed since the last time; a line without its end is not there yet."""
        try:
            found = self._path.stat()
        except FileNotFoundError:  # nobody was registered yet
            return
        if found.st_ino != self._file or found.st_size < self._read:  # another file: the run was made anew
            self._file, self._read = found.st_ino, 0
            self.sessions.clear()
            self._places.clear()
        if found.st_size == self._read:
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines, end, _ = file.read().rpartition(b"\n")
        self._read += len(lines + end)
        for line in lines.splitlines():
            self._take(line)

    def placed(self, mode: str, address: str) -> Session | None:
        """The session that comes through this proxy mode or from this address; the first of several."""
        places = (("mode", mode), ("address", address))
        name = next((self._places[place] for place in places if place[1] and place in self._places), None)
        return self.sessions[name].session if name is not None else None

    def append(self, line: dict[str, Any], *, durable: bool = False) -> None:  # Any: JSON
        """Write a line behind what is there, which another writer may have left torn; the caller holds the lock."""
        text = json.dumps(line).encode() + b"\n"
        with self._path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.write(text if size == self._read else b"\n" + text)  # what was not read is a torn line: close it
            file.flush()
            if durable:
                os.fsync(file.fileno())

    def _take(self, text: bytes) -> None:
        try:
            line: dict[str, Any] = json.loads(text)  # Any: JSON
        except ValueError:  # torn by the end of its writer, and closed by the next one: it never was complete
            return
        name = str(line["session_id"])
        if "sealed" in line:
            self.sessions[name] = replace(known := self.sessions[name], session=replace(known.session, sealed=True))
            return
        hosts = tuple(map(str, line.get("allow_hosts", ())))
        terms = Session(name, line["group_id"], True, line.get("turns"), line.get("tokens"), hosts)
        self.sessions[name] = _Known(terms, str(line["secret"]))
        for kind in ("mode", "address"):
            if line.get(kind):
                self._places.setdefault((kind, str(line[kind])), name)


@contextmanager
def _writing(run: Path) -> Generator[_Log]:
    """The log of a run, read to its end, with the right to append to it: of all threads and processes only here."""
    log, lock = _shared_log(run.resolve())
    descriptor = os.open(run / _FILE, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        with lock:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            log.read_on()
            yield log
    finally:
        os.close(descriptor)


@cache
def _shared_log(run: Path) -> tuple[_Log, threading.Lock]:
    """A runner registers thousands of sessions of one run: the lines before are not read again for each."""
    return _Log(run), threading.Lock()


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
