"""The name service of one sandbox: allowed names get an address of their own, every other does not exist.

Invariant: nothing is forwarded to anybody, so that no look-up leaves the machine, and a name that was given an address
consists of plain labels: it can stand in a header. Pure; it holds no socket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import IPv4Address
from re import compile as pattern

_FIRST = IPv4Address("198.18.0.1")
"""Of 198.18.0.0/15, which is for benchmarks of networks and routed nowhere."""
_MOST_NAMES = 4096
_MOST_REFUSED = 256
OTHERS = "(others)"
"""What is refused once there are too many names to count each."""
_LONGEST_QUERY = 1232
"""Bytes; the customary size of a DNS packet."""
_LONGEST_NAME = 253
_LABELS = pattern(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_HEADER, _QUESTION = 12, 4
_A, _INTERNET = b"\0\1", b"\0\1"
_TTL_S = 60
_NO_ERROR, _NO_SUCH_NAME = 0, 3


class Names:
    """The names of one sandbox."""

    def __init__(self, allowed: Sequence[str]) -> None:
        """`allowed` are names, or `*.NAME` for all below one."""
        self.refused: Counter[str] = Counter()
        """Names and destinations that were asked for in vain."""
        self._allowed = tuple(name.lower().rstrip(".") for name in allowed)
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def name_at(self, address: str) -> str | None:
        """The name that was given this address."""
        return self._names.get(address)

    def refuse(self, wanted: str) -> None:
        """Count what was asked for in vain."""
        known = wanted in self.refused or len(self.refused) < _MOST_REFUSED
        self.refused[wanted if known else OTHERS] += 1

    def answer(self, query: bytes) -> bytes | None:
        """The answer to a DNS query, or None for what is none."""
        read = _read_question(query)
        if read is None:
            return None
        name, kind, end = read
        question = query[_HEADER:end]
        address = self._address(name)
        if address is None:
            self.refuse(name)
            return _answer(query, question, _NO_SUCH_NAME, b"")
        if kind != _A:  # such as AAAA: the name exists, but has nothing of this kind
            return _answer(query, question, _NO_ERROR, b"")
        record = b"\xc0\x0c" + _A + _INTERNET + _TTL_S.to_bytes(4) + b"\0\4" + IPv4Address(address).packed
        return _answer(query, question, _NO_ERROR, record)

    def _address(self, name: str) -> str | None:
        if name not in self._addresses:
            full = len(self._addresses) >= _MOST_NAMES
            if full or not _LABELS.fullmatch(name) or not any(fnmatchcase(name, known) for known in self._allowed):
                return None
            address = str(_FIRST + len(self._addresses))
            self._addresses[name], self._names[address] = address, name
        return self._addresses[name]


def _read_question(query: bytes) -> tuple[str, bytes, int] | None:
    """The name, the record type, and where the question ends; None unless it is one plain question."""
    if not _HEADER < len(query) <= _LONGEST_QUERY or query[2] & 0xF8 or query[4:6] != b"\0\1":
        return None  # too short or too long, an answer or no look-up, not exactly one question
    labels: list[str] = []
    at = _HEADER
    while at < len(query) and 0 < (length := query[at]) < 64:
        labels.append(query[at + 1 : at + 1 + length].decode("latin-1"))
        at += 1 + length
    end = at + 1 + _QUESTION
    name = ".".join(labels).lower()
    if end > len(query) or query[at] or len(name) > _LONGEST_NAME or query[end - 2 : end] != _INTERNET:
        return None
    return name, query[at + 1 : at + 3], end


def _answer(query: bytes, question: bytes, code: int, record: bytes) -> bytes:
    flags = bytes([0x80 | query[2] & 1, 0x80 | code])  # an answer; recursion is available, and desired as it was asked
    return query[:2] + flags + b"\0\1" + (b"\0\1" if record else b"\0\0") + b"\0\0\0\0" + question + record
