"""A log keeps its beginning and its end, whatever is printed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_toolkit.rollout.sandbox.capture import CappedFile, pump


def kept(path: Path, pieces: list[bytes], limit: int) -> bytes:
    with CappedFile(path, limit) as file:
        for piece in pieces:
            file.write(piece)
    return path.read_bytes()


def test_short_output_is_kept_as_it_is(tmp_path: Path):
    """Up to the bound, nothing is changed."""
    assert kept(tmp_path / "log", [b"12345", b"678"], 8) == b"12345678"


def test_long_output_keeps_both_ends_and_says_what_is_missing(tmp_path: Path):
    """The first and the last half stand around a line with the number of bytes that are not there."""
    text = kept(tmp_path / "log", [b"abcd", b"efghi", b"jklmnop"], 8)
    assert text == b"abcd\n[... 8 bytes are missing here ...]\nmnop"


@given(st.lists(st.binary(max_size=50), max_size=12), st.integers(1, 20).map(lambda half: 2 * half))
def test_it_does_not_matter_how_output_arrives(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], limit: int
):
    """In whatever pieces it comes, the same is kept."""
    whole = b"".join(pieces)
    half, missing = limit // 2, len(whole) - limit
    notice = b"\n[... %d bytes are missing here ...]\n" % missing
    expected = whole if missing <= 0 else whole[:half] + notice + whole[-half:]
    assert kept(tmp_path_factory.mktemp("log") / "log", pieces, limit) == expected


def test_an_unclosed_log_is_readable(tmp_path: Path):
    """What was printed before a crash of ours is in the file."""
    with CappedFile(tmp_path / "log") as file:
        file.write(b"so far")
        assert (tmp_path / "log").read_bytes() == b"so far"


def test_pump_writes_a_stream_to_its_end(tmp_path: Path):
    """All of a stream lands in the file."""

    async def scenario() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"x" * 100_000)
        reader.feed_eof()
        with CappedFile(tmp_path / "log") as file:
            await pump(reader, file)

    asyncio.run(scenario())
    assert (tmp_path / "log").read_bytes() == b"x" * 100_000
