"""Speaking to an engine: refusals, silence and streams."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.sandbox import SandboxError
from polar_toolkit.rollout.sandbox.capture import CappedFile
from polar_toolkit.rollout.sandbox.docker_engine import Engine, sort_frames


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4) + data


def sorted_out(folder: Path, data: bytes) -> tuple[bytes, bytes]:
    async def scene() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        with CappedFile(folder / "out") as out, CappedFile(folder / "err") as err:
            await sort_frames(reader, out, err)

    asyncio.run(scene())
    return (folder / "out").read_bytes(), (folder / "err").read_bytes()


def test_the_two_streams_are_told_apart(tmp_path: Path):
    """Frame by frame, large ones too."""
    data = frame(1, b"a" * 200_000) + frame(2, b"oops") + frame(1, b"b")
    assert sorted_out(tmp_path, data) == (b"a" * 200_000 + b"b", b"oops")


def test_a_stream_that_breaks_off_keeps_what_came(tmp_path: Path):
    """In the middle of a frame, or of its head."""
    assert sorted_out(tmp_path, frame(1, b"begun") + frame(1, b"cut")[:-2]) == (b"begunc", b"")
    assert sorted_out(tmp_path, frame(1, b"begun") + b"\1\0") == (b"begun", b"")


def test_an_engine_that_refuses_is_quoted():
    """With its own words."""

    async def scene() -> None:
        engine = Engine()
        try:
            await engine.do(lambda api: api.inspect_container("no-such-container"))
        finally:
            engine.close()

    with pytest.raises(SandboxError, match="refused: No such container"):
        asyncio.run(scene())


def test_starting_what_is_not_there_is_refused():
    """Over the stream that commands use, too."""

    async def scene() -> None:
        engine = Engine()
        try:
            await engine.start("0" * 64)
        finally:
            engine.close()

    with pytest.raises(SandboxError, match=r"refused: .*No such exec"):
        asyncio.run(scene())


@pytest.mark.parametrize("host", ["ssh://somewhere", "nonsense:"])
def test_an_address_that_cannot_be_used_is_refused(host: str, monkeypatch: pytest.MonkeyPatch):
    """At once, with what can."""
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(Refusal, match=f"DOCKER_HOST '{host}' cannot be used"):
        Engine()
