"""The bytes of a journal file: rows to frames and back.

A file is eight magic bytes, then frames: length, CRC-32, payload. The first payload is the Arrow schema of the rows,
so that those of earlier versions stay readable; every other one is a packed row, compressed, behind its key.
Invariant: reading stops at the first frame that is short or does not match its checksum; a writer died there, and
nothing behind it was ever acknowledged. This module opens files to read them and never changes one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import zstandard

from polar_mitm.journal.packing import Row, pack, to_table
from polar_mitm.rows import SCHEMA, SCHEMA_VERSION

Kind = Literal[b"B", b"F"]
BEGUN: Kind = b"B"
FINISHED: Kind = b"F"

_MAGIC = b"polarj2\n"
_EARLIER = b"polarj1\n"  # rows as Arrow, before the first release
_SCHEMA = b"S"
_FRAME = struct.Struct("<QI")  # length and CRC-32 of the payload
_KEY = struct.Struct("<cqiB")  # kind, sequence, choice, length of the call_id that follows
_GROUP_BYTES = 16 << 20  # of frames in one piece of a table: bounds the memory that sealing takes


class UnreadableRun(Exception):
    """A file of a run folder is not what it claims to be; the message names it."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row on its way into a journal."""

    kind: Kind
    call_id: str
    choice: int
    key: bytes
    row: bytes
    """Packed."""

    def frame(self, compress: Callable[[bytes], bytes]) -> bytes:
        """The row's frame; `compress` makes a zstd frame with its size."""
        return _frame(self.key + compress(self.row))


def record(kind: Kind, row: Row) -> Record:
    """A Record of `row`, which has at least call_id, choice and sequence; later changes of it are not seen.

    Raises KeyError for a missing key, and what `pack` raises.
    """
    call_id: str = row["call_id"]
    name = call_id.encode()
    key = _KEY.pack(kind, row["sequence"], row["choice"], len(name))
    return Record(kind, call_id, row["choice"], key + name, pack(row))


def head() -> bytes:
    """What a journal file begins with."""
    return _MAGIC + _frame(_SCHEMA + stamped_schema().serialize().to_pybytes())


def stamped_schema() -> pa.Schema:
    """rows.SCHEMA with its version in the metadata, as journals and Parquet files carry it."""
    return SCHEMA.with_metadata({"schema_version": str(SCHEMA_VERSION)})


def check_version(path: Path, schema: pa.Schema) -> None:
    """Raise UnreadableRun when the file at `path`, by its schema, does not hold calls that can be read here."""
    version = (schema.metadata or {}).get(b"schema_version", b"").decode()
    if not version.isdecimal() or not {"writer", "sequence", "call_id", "choice"} <= set(schema.names):
        raise UnreadableRun(f"{path} is not a table of polar-mitm's calls: move it out of the run folder")
    if int(version) > SCHEMA_VERSION:
        raise UnreadableRun(f"{path} has schema version {version}, this polar-mitm reads {SCHEMA_VERSION}: upgrade it")


def conform(table: pa.Table) -> pa.Table:
    """The table as rows.SCHEMA: columns that its version did not have are null."""
    columns = [
        table[field.name].cast(field.type) if field.name in table.schema.names else pa.nulls(len(table), field.type)
        for field in SCHEMA
    ]
    return pa.table(columns, schema=SCHEMA)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a journal holds, up to its first broken frame."""

    data: pa.Buffer
    """The file, mapped."""
    schema: pa.Schema
    begun: dict[tuple[str, int], Found]
    """The begun row of each (call_id, choice) without a finished one."""
    finished: dict[tuple[str, int], Found]
    """The last finished row of each (call_id, choice)."""
    end: int
    """Where the valid frames end."""

    @property
    def torn(self) -> int:
        """Bytes behind the last valid frame."""
        return self.data.size - self.end

    def tables(self, *, lost: bool) -> Iterator[pa.Table]:
        """The rows as rows.SCHEMA in the order of (sequence, choice), those of unfinished calls only if `lost`.

        Each table is of one chunk and of bounded size.
        """
        found = [*self.finished.values(), *(self.begun.values() if lost else ())]
        found.sort(key=lambda row: (row.sequence, row.choice))
        decompress = zstandard.ZstdDecompressor().decompress
        for group in _groups(found):
            packed = (decompress(self.data[row.start : row.end]) for row in group)
            yield conform(to_table(packed, self.schema))


@dataclass(frozen=True, slots=True)
class Found:
    """Where a row lies in a journal."""

    sequence: int
    choice: int
    start: int
    end: int


def open_journal(path: Path) -> Contents:
    """Index a journal, which may be growing. Raises UnreadableRun when it is foreign or of another format."""
    with pa.memory_map(str(path)) as file:
        data: pa.Buffer = file.read_buffer()
    view = memoryview(data)
    if bytes(view[: len(_EARLIER)]) == _EARLIER:
        raise UnreadableRun(f"{path} is of an earlier format: start and stop the polar-mitm that wrote it, to seal it")
    if bytes(view[: len(_MAGIC)]) != _MAGIC:
        raise UnreadableRun(f"{path} is not a journal of polar-mitm: move it out of the run folder")
    spans = list(_payloads(view))
    if not spans:
        return Contents(data, SCHEMA, {}, {}, len(_MAGIC))
    (start, end), *rows = spans
    schema = pa.ipc.read_schema(data[start + len(_SCHEMA) : end])
    check_version(path, schema)
    begun, finished = _index(view, rows)
    return Contents(data, schema, begun, finished, spans[-1][1])


def _index(
    data: memoryview, spans: list[tuple[int, int]]
) -> tuple[dict[tuple[str, int], Found], dict[tuple[str, int], Found]]:
    begun: dict[tuple[str, int], Found] = {}
    finished: dict[tuple[str, int], Found] = {}
    for start, end in spans:
        kind, sequence, choice, length = _KEY.unpack_from(data, start)
        name = start + _KEY.size
        call_id = bytes(data[name : name + length]).decode()
        found = Found(sequence, choice, name + length, end)
        if kind == BEGUN:
            begun[call_id, choice] = found
        else:
            begun.pop((call_id, choice), None)
            finished[call_id, choice] = found
    return begun, finished


def _frame(payload: bytes) -> bytes:
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _payloads(data: memoryview) -> Iterator[tuple[int, int]]:
    """Start and end of each valid payload."""
    start = len(_MAGIC) + _FRAME.size
    while start <= len(data):
        length, checksum = _FRAME.unpack_from(data, start - _FRAME.size)
        end = start + length
        # Length 0 is what a file system leaves where data never arrived, and its CRC-32 would match.
        if length == 0 or end > len(data) or zlib.crc32(data[start:end]) != checksum:
            return
        yield start, end
        start = end + _FRAME.size


def _groups(rows: list[Found]) -> Iterator[list[Found]]:
    group: list[Found] = []
    size = 0
    for row in rows:
        group.append(row)
        size += row.end - row.start
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
