"""The name service of a sandbox."""

from __future__ import annotations

import struct
from ipaddress import ip_address, ip_network

import pytest

from polar_toolkit.rollout.sandbox.names import OTHERS, Names

A, AAAA, HTTPS = 1, 28, 65
EXTRA = b"\0\0\x29\x04\xd0\0\0\0\0\0\0"  # EDNS, as resolvers of today send it


def query(name: str | bytes, kind: int = A, extra: bytes = b"") -> bytes:
    text = name.encode() if isinstance(name, str) else name
    labels = b"".join(bytes([len(label)]) + label for label in text.split(b".") if label)
    return (
        b"\x12\x34\x01\0\0\1\0\0\0\0\0"
        + (b"\1" if extra else b"\0")
        + labels
        + b"\0"
        + struct.pack(">HH", kind, 1)
        + extra
    )


def address(names: Names, name: str | bytes, kind: int = A, extra: bytes = b"") -> str | None:
    """What was answered; '' for a name that exists without such a record, None for one that does not exist."""
    asked = query(name, kind, extra)
    answer = names.answer(asked)
    assert answer is not None
    assert answer[:2] == b"\x12\x34"
    assert answer[12:].startswith(asked[12 : len(asked) - len(extra)])  # the question, as it was asked
    if answer[3] & 15 == 3:
        return None
    return str(ip_address(answer[-4:])) if answer[7] else ""


def test_an_allowed_name_has_an_address_that_tells_it_again():
    """Each name has an address of its own in 198.18.0.0/15, and the address gives the name."""
    names = Names(["api.openai.com", "api.anthropic.com"])
    first, second = (address(names, name) for name in ("api.openai.com", "api.anthropic.com"))
    assert first
    assert second
    assert first != second
    assert all(ip_address(each) in ip_network("198.18.0.0/15") for each in (first, second))
    assert (names.name_at(first), names.name_at(second)) == ("api.openai.com", "api.anthropic.com")
    assert address(names, "api.openai.com") == first
    assert not names.refused


def test_case_and_a_trailing_dot_make_no_other_name():
    """Names are the same in any case, in the list of what is allowed, too."""
    names = Names(["API.OpenAI.com."])
    assert address(names, "api.openai.com") == address(names, "Api.OPENAI.com.", extra=EXTRA) is not None


def test_a_pattern_allows_what_is_below_a_name():
    """`*.NAME` is every name below NAME, and neither NAME itself nor one that ends alike."""
    names = Names(["*.example.com"])
    assert address(names, "a.example.com")
    assert address(names, "a.b.example.com")
    assert address(names, "example.com") is None
    assert address(names, "badexample.com") is None


def test_every_other_name_does_not_exist_and_is_counted():
    """A name that is not allowed is answered at once, and counted."""
    names = Names(["api.openai.com"])
    for _ in range(2):
        assert address(names, "pypi.example") is None
    assert names.refused == {"pypi.example": 2}


@pytest.mark.parametrize("kind", [AAAA, HTTPS])
def test_an_allowed_name_has_no_other_records(kind: int):
    """The name exists, but there is nothing of that kind: the asker takes the IPv4 address."""
    assert address(Names(["api.openai.com"]), "api.openai.com", kind) == ""


@pytest.mark.parametrize("label", [b"x\r\nA:b", b"x y", b"x\0", b"\xff", b"x:443 HTTP/1.1"])
def test_a_name_that_could_not_stand_in_a_header_does_not_exist(label: bytes):
    """Below an allowed pattern, too, a name is made of letters, digits, '-' and '_'."""
    assert address(Names(["*.example.com"]), label + b".example.com") is None


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        query("a.example")[:12],
        query("a.example")[:-1],
        b"\x12\x34\x81" + query("a.example")[3:],
        query("a.example")[:5] + b"\2" + query("a.example")[6:],
        query("a.example")[:12] + b"\xc0\x0c" + b"\0\1\0\1",
        query("a.example") + bytes(2000),
    ],
    ids=["empty", "no question", "cut", "an answer", "two questions", "pointer", "too long"],
)
def test_what_is_no_plain_question_is_not_answered(packet: bytes):
    """Nothing is said to a malformed packet, and nothing is remembered of it."""
    names = Names(["*.example"])
    assert names.answer(packet) is None
    assert not names.refused


def test_what_is_remembered_is_bounded():
    """Thousands of names, refused or allowed, do not grow the memory without end."""
    names = Names(["*.example"])
    for number in range(5000):
        names.answer(query(f"n{number}.example"))
        names.answer(query(f"n{number}.elsewhere"))
    assert len(names.refused) < 300
    assert names.refused[OTHERS] > 4000
    assert address(names, "n0.example")
    assert address(names, "n4999.example") is None
