"""Plain records of other systems become a run folder that every other command reads.

Invariant: each record is a row or a line of quarantine.jsonl with its reason; the folder appears whole or not at all
and replaces nothing. Rows name no parent: merging finds it by comparing tokens. Memory is bounded by a chunk of rows,
and by the names of calls and sessions. What a record may look like is decided in records.py.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from polar_mitm.journal.frames import conform, stamped_schema
from polar_mitm.rows import SCHEMA, SCHEMA_VERSION
from polar_toolkit import rewards
from polar_toolkit.errors import Refusal
from polar_toolkit.records import BadRecord, Record, parse, read
from polar_toolkit.trajectories import list_column

QUARANTINE = "quarantine.jsonl"
SHOWN = 20
"""Bad records that a summary keeps; all are in the file."""
_CHUNK = 4_000_000
"""Tokens of the rows that are written at once."""
_REPEATED = ["run_id", "writer", "session_id", "group_id", "thread_id", "kind", "status", "root_reason"]
"""Columns that a dictionary makes smaller; trying it on token ids costs as much as writing them."""


@dataclass(slots=True)
class Summary:
    """What became of the records."""

    taken: int = 0
    sampled: int = 0
    """Output tokens of the records that were taken."""
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    """FILE:LINE: reason, at most SHOWN."""
    sessions: set[str] = field(default_factory=set)
    rewards: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By session the order and the reward of its last record that has one."""

    @property
    def bad_share(self) -> float:
        """Bad records among all."""
        return self.bad / max(1, self.bad + self.taken)

    def add(self, row: _Row) -> None:
        """Count a record that is taken."""
        self.taken += 1
        self.sampled += len(row.record.output_ids)
        self.sessions.add(row.session_id)
        if row.record.reward is not None and row.sequence >= self.rewards.get(row.session_id, (row.sequence, 0.0))[0]:
            self.rewards[row.session_id] = row.sequence, row.record.reward


def import_records(files: Sequence[Path], out: Path, *, temperature: float) -> Summary:
    """Write the run folder `out` from .jsonl and .parquet files, one record a call.

    `temperature` is of records that name none. Raises Refusal, with nothing written, when `out` exists, or a file
    cannot be read, or no record can be taken.
    """
    if out.exists():
        raise Refusal(f"{out} exists; give a folder that does not, nothing is overwritten")
    run_id = _run_id(files)
    summary = Summary()
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        _fill(fresh, files, _Writing(run_id, temperature), summary)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return summary


def lines(summary: Summary, out: Path) -> Iterator[str]:
    """The summary for people."""
    yield (
        f"{summary.taken:,} calls of {len(summary.sessions):,} sessions with {summary.sampled:,} sampled tokens and "
        f"{len(summary.rewards):,} rewards: {out}"
    )
    if summary.bad:
        yield f"bad records: {summary.bad:,}, all listed in {out / QUARANTINE}:"
        yield from summary.first_bad
    if summary.bad > len(summary.first_bad):
        yield f"and {summary.bad - len(summary.first_bad):,} more"


@dataclass(frozen=True, slots=True)
class _Writing:
    """What all rows have in common."""

    run_id: str
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    record: Record
    call_id: str
    session_id: str
    sequence: int


def _run_id(files: Sequence[Path]) -> str:
    """A name for the files' contents, so that two imports of them are known as copies."""
    total = blake2b(digest_size=8)
    for path in files:
        if not path.is_file():
            raise Refusal(f"{path} does not exist; give .jsonl or .parquet files, one record a call")
        with path.open("rb") as file:
            total.update(file_digest(file, "blake2b").digest())
    return f"import-{total.hexdigest()}"


def _fill(fresh: Path, files: Sequence[Path], writing: _Writing, summary: Summary) -> None:
    (fresh / "calls").mkdir()
    with (
        (fresh / QUARANTINE).open("w") as quarantine,
        pq.ParquetWriter(
            fresh / "calls" / "import-000001.parquet",
            stamped_schema(),
            compression="zstd",
            use_dictionary=_REPEATED,  # pyright: ignore[reportArgumentType] - pyarrow's stub knows no lists
        ) as writer,
    ):
        for chunk in _chunks(_rows(files, quarantine, summary)):
            writer.write_table(_table(chunk, writing).replace_schema_metadata(stamped_schema().metadata))
    if not summary.taken:
        first = summary.first_bad[0] if summary.first_bad else "the files are empty"
        raise Refusal(f"none of {summary.bad} records can be taken, the first because of {first}")
    if not summary.bad:
        (fresh / QUARANTINE).unlink()
    if summary.rewards:
        scores = {session: reward for session, (_, reward) in summary.rewards.items()}
        (fresh / rewards.FILE).write_text(rewards.as_lines(scores))
    info = {"schema_version": 1, "run_id": writing.run_id, "imported": [path.name for path in files]}
    (fresh / "run.json").write_text(json.dumps(info, indent=1) + "\n")
    for path in fresh.rglob("*"):
        if path.is_file():
            path.chmod(0o600)


def _rows(files: Sequence[Path], quarantine: IO[str], summary: Summary) -> Iterator[_Row]:
    """The good records as rows; the bad ones go to `quarantine`."""
    seen: set[tuple[str, int]] = set()
    for path in files:
        for line, raw in read(path):
            try:
                if isinstance(raw, str):
                    raise BadRecord(raw)
                row = _row(parse(raw), path, summary.taken + summary.bad)
                if (row.call_id, row.record.choice) in seen:
                    raise BadRecord(f"call {row.call_id!r}, choice {row.record.choice}, was there before")
            except BadRecord as error:  # listed, and the next record is read
                _set_aside(quarantine, summary, f"{path.name}:{line}", str(error))
                continue
            seen.add((row.call_id, row.record.choice))
            summary.add(row)
            yield row


def _row(record: Record, path: Path, position: int) -> _Row:
    return _Row(
        record,
        record.call_id or f"import{position:014d}",
        record.session_id or path.stem,
        position if record.order is None else record.order,
    )


def _set_aside(quarantine: IO[str], summary: Summary, where: str, reason: str) -> None:
    quarantine.write(json.dumps({"where": where, "reason": reason}) + "\n")
    summary.bad += 1
    if len(summary.first_bad) < SHOWN:
        summary.first_bad.append(f"{where}: {reason}")


def _chunks(rows: Iterable[_Row]) -> Iterator[list[_Row]]:
    chunk: list[_Row] = []
    tokens = 0
    for row in rows:
        chunk.append(row)
        tokens += len(row.record.prompt_ids) + len(row.record.output_ids)
        if tokens >= _CHUNK:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


def _table(rows: Sequence[_Row], writing: _Writing) -> pa.Table:
    """Rows as rows.SCHEMA; what a plain record does not say is null."""
    records = [row.record for row in rows]
    columns: dict[str, Sequence[Any] | pa.Array] = {  # Any: values of the column's type
        "schema_version": [SCHEMA_VERSION] * len(rows),
        "run_id": [writing.run_id] * len(rows),
        "writer": ["import"] * len(rows),
        "sequence": [row.sequence for row in rows],
        "call_id": [row.call_id for row in rows],
        "choice": [record.choice for record in records],
        "session_id": [row.session_id for row in rows],
        "group_id": [record.group_id for record in records],
        "thread_id": [record.thread_id for record in records],
        "kind": [record.kind or "agent" for record in records],
        "status": ["completed"] * len(rows),
        "root_reason": ["unknown_history"] * len(rows),
        "prompt_len": [len(record.prompt_ids) for record in records],
        "prompt_shared": [0] * len(rows),
        "prompt_suffix": list_column([record.prompt_ids for record in records], pa.int32()),
        "output_ids": list_column([record.output_ids for record in records], pa.int32()),
        "logprobs": list_column([record.logprobs for record in records], pa.float32()),
        "versions": [_spans(record) for record in records],
        "temperature": [record.temperature or writing.temperature for record in records],
        "trainable": [True] * len(rows),
        "client_delivered": [True] * len(rows),
    }
    return conform(pa.table({name: pa.array(v, SCHEMA.field(name).type) for name, v in columns.items()}))


def _spans(record: Record) -> list[dict[str, Any]] | None:  # Any: a span's bounds and name
    if record.version is None:
        return None
    return [{"start": 0, "end": len(record.output_ids), "version": record.version}]
