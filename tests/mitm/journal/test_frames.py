"""The bytes of a journal file."""

import asyncio
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
import zstandard

from polar_mitm.journal import Journal, UnreadableRun, read_calls
from polar_mitm.rows import SCHEMA


def frame(payload: bytes) -> bytes:
    return struct.pack("<QI", len(payload), zlib.crc32(payload)) + payload


def frame_starts(data: bytes) -> list[int]:
    starts, at = [], 8
    while at < len(data):
        starts.append(at)
        at += 12 + struct.unpack_from("<Q", data, at)[0]
    return starts


def test_a_torn_tail_is_cut_at_the_last_valid_frame(
    journal: Journal, run: Path, tmp_path: Path, record: Callable[..., Any], orphan: Callable[..., Path]
):
    """Cut anywhere in its last frame, a journal yields every row before it, and that one as lost."""
    record(journal, "first", "second")
    path = orphan(run, tmp_path / "copy")
    data = path.read_bytes()
    last = frame_starts(data)[-1]
    for cut in range(last, len(data)):
        path.write_bytes(data[:cut])
        calls = read_calls(tmp_path / "copy")
        assert calls.select(["call_id", "status"]).to_pylist() == [
            {"call_id": "first", "status": "completed"},
            {"call_id": "second", "status": "lost"},
        ], cut


def test_a_flipped_bit_ends_the_journal_before_its_frame(
    journal: Journal, run: Path, tmp_path: Path, record: Callable[..., Any], orphan: Callable[..., Path]
):
    """No damaged row is ever read: damage anywhere in the last frame leaves the rows before it."""
    record(journal, "first", "second")
    path = orphan(run, tmp_path / "copy")
    data = path.read_bytes()
    last = frame_starts(data)[-1]
    for at in range(last, len(data), 7):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert read_calls(tmp_path / "copy")["status"].to_pylist() == ["completed", "lost"], at


def test_zeros_after_the_last_frame_are_no_frame(
    journal: Journal, run: Path, tmp_path: Path, record: Callable[..., Any], orphan: Callable[..., Path]
):
    """A tail of zeros, as a file system leaves after a power cut, is cut off."""
    record(journal, "first")
    path = orphan(run, tmp_path / "copy")
    path.write_bytes(path.read_bytes() + bytes(4096))
    assert read_calls(tmp_path / "copy")["call_id"].to_pylist() == ["first"]


def test_a_journal_of_an_earlier_version_is_readable(run: Path):
    """A journal is read by the schema at its head; columns that it did not have are null."""
    kept = [field for field in SCHEMA if field.name != "rerender_shared"]
    old = pa.schema(kept, metadata={"schema_version": "0"})
    values = {"call_id": "old", "writer": "w", "sequence": 7, "choice": 0, "status": "completed"}
    row = frame(struct.pack("<cqiB", b"F", 7, 0, 3) + b"old" + zstandard.compress(msgpack.packb(values)))
    (run / "journal").mkdir(parents=True)
    head = frame(b"S" + old.serialize().to_pybytes())
    (run / "journal" / "w-000001.journal").write_bytes(b"polarj2\n" + head + row)
    calls = read_calls(run)
    assert calls.schema == SCHEMA
    assert calls.select(["call_id", "status", "rerender_shared"]).to_pylist() == [
        {"call_id": "old", "status": "completed", "rerender_shared": None}
    ]


def test_a_journal_of_a_later_version_is_refused(run: Path):
    """What cannot be understood is named, not skipped."""
    later = SCHEMA.with_metadata({"schema_version": "99"})
    (run / "journal").mkdir(parents=True)
    head = frame(b"S" + later.serialize().to_pybytes())
    (run / "journal" / "w-000001.journal").write_bytes(b"polarj2\n" + head)
    with pytest.raises(UnreadableRun, match=r"w-000001\.journal has schema version 99"):
        read_calls(run)


def test_a_journal_of_an_earlier_format_is_refused(run: Path):
    """The sentence says what to do with it, and recovery leaves it where it is."""
    (run / "journal").mkdir(parents=True)
    path = run / "journal" / "w-000001.journal"
    path.write_bytes(b"polarj1\n" + frame(b"S"))
    for read in (read_calls, Journal.open):
        with pytest.raises(UnreadableRun, match="start and stop the polar-mitm that wrote it"):
            read(run)
    assert path.exists()


@pytest.mark.parametrize("content", [b"", b"polar", b"SQLite format 3\0 and more"])
def test_a_foreign_journal_is_refused(run: Path, content: bytes):
    """A file that is no journal is named, not skipped."""
    (run / "journal").mkdir(parents=True)
    (run / "journal" / "x.journal").write_bytes(content)
    with pytest.raises(UnreadableRun, match=r"x\.journal is not a journal"):
        read_calls(run)


def test_a_call_of_200_tokens_costs_at_most_20_bytes_a_token(
    journal: Journal, run: Path, record: Callable[..., Any], completed: Callable[..., dict[str, Any]]
):
    """Begin and finish records together, with random ids and logprobs, 100 new prompt tokens and 3 kB of text."""
    record(journal, "first")
    (path,) = (run / "journal").iterdir()
    before = path.stat().st_size
    rng = np.random.default_rng(0)
    text = json.dumps([{"role": "user", "content": "fix the failing test in the parser " * 28}])
    begun = journal.begin({"call_id": "c" * 20, "messages": text})
    row = completed(begun, 200) | {"request": text, "answer": text}
    row["prompt_suffix"] = rng.integers(0, 150_000, 100, dtype=np.int32)
    asyncio.run(journal.finish([row]))
    assert path.stat().st_size - before <= 20 * 200
