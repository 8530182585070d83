"""All calls of a run as one table, wherever they lie at the moment.

Invariant: a (call_id, choice) is in the table once, by its last record, whatever is being written, sealed or
recovered meanwhile. This module changes nothing in the run folder. A run that is too large for one table is read in
three steps: `settle` names files that change no more, `row_groups` tells what is in each, `read_row_groups` reads some.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from polar_mitm.journal.frames import Contents, UnreadableRun, check_version, conform, open_journal, stamped_schema
from polar_mitm.journal.sealing import lock_dead
from polar_mitm.rows import SCHEMA

_KEY = ("writer", "sequence", "call_id", "choice", "session_id")


def read_calls(run: Path, session_id: str | None = None, columns: Sequence[str] = SCHEMA.names) -> pa.Table:
    """The calls of a run as rows.SCHEMA, in the order of (writer, sequence, choice), each (call_id, choice) once.

    With `session_id`, those of one session; columns that are not asked for may be null. Sealed and live journals are
    read. What a living writer has not finished is left out; what a dead one has not finished has status "lost".
    Raises UnreadableRun when `run` is no run folder, or for the first file in it that is truncated, foreign or of a
    later version.
    """
    _check_run(run)
    # Journals first: one that is sealed meanwhile is then found among the Parquet files.
    wanted = list(dict.fromkeys((*_KEY, *columns)))
    parts = [(path.stem, "journal", _read_journal(path, session_id)) for path in (run / "journal").glob("*.journal")]
    parts += [(p.stem, "calls", _read_sealed(p, session_id, wanted)) for p in (run / "calls").glob("*.parquet")]
    parts.sort(key=lambda part: part[:2])
    return _latest(pa.concat_tables([SCHEMA.empty_table(), *(table for _, _, table in parts)]))


def settle(run: Path, scratch: Path, columns: Sequence[str]) -> list[Path]:
    """Parquet files that hold all calls of a run as they are now, and that change no more: later ones replace rows.

    They are the sealed ones, and in the folder `scratch` a copy of every journal that is not sealed, with `columns`
    only. Raises UnreadableRun as `read_calls`.
    """
    _check_run(run)
    wanted = list(dict.fromkeys((*_KEY, *columns)))
    copies = (_copy(path, scratch, wanted) for path in (run / "journal").glob("*.journal"))
    parts = [(path.stem, "journal", path) for path in copies if path is not None]
    parts += [(path.stem, "calls", path) for path in (run / "calls").glob("*.parquet")]
    return [path for _, _, path in sorted(parts, key=lambda part: part[:2])]


def row_groups(path: Path, columns: Sequence[str]) -> list[tuple[pa.Table, dict[str, int]]]:
    """Of each row group of a settled file: some columns as in rows.SCHEMA, and the elements of each list column.

    Raises UnreadableRun.
    """
    with _parquet(path) as file:
        known = [name for name in columns if name in file.schema_arrow.names]
        numbers = range(file.num_row_groups)
        return [(conform(file.read_row_group(i, known)).select(columns), _elements(file, i)) for i in numbers]


def read_row_groups(places: Iterable[tuple[Path, int]], sessions: Collection[str], columns: Sequence[str]) -> pa.Table:
    """The calls of some sessions from row groups of settled files, which are given in the order of `settle`.

    The table is as that of `read_calls`. One row group at a time is in memory besides. Raises UnreadableRun.
    """
    wanted, names = list(dict.fromkeys((*_KEY, *columns))), pa.array(sorted(sessions), pa.string())
    tables = [SCHEMA.empty_table()]
    for path, group in places:
        with _parquet(path) as file:
            known = [name for name in wanted if name in file.schema_arrow.names]
            rows = file.read_row_group(group, known, use_threads=False)  # the caller may have processes of its own
            tables.append(conform(rows.filter(pc.field("session_id").isin(names))))
    return _latest(pa.concat_tables(tables))


def sealed_sessions(run: Path) -> set[str]:
    """The sessions of the run's sealed journals: all that ended before this process began, and perhaps more."""
    tables = (_read_sealed(path, None, [*_KEY]) for path in (run / "calls").glob("*.parquet"))
    return {name for table in tables for name in table["session_id"].unique().to_pylist() if name is not None}


def _check_run(run: Path) -> None:
    if not (run / "journal").is_dir() and not (run / "calls").is_dir():
        raise UnreadableRun(f"{run} is no run folder: it has neither journal/ nor calls/")


def _copy(path: Path, scratch: Path, columns: list[str]) -> Path | None:
    """Some columns of a journal as Parquet, a bounded part of it in memory at a time; None when it is sealed now."""
    opened = _open(path)
    if opened is None:
        return None
    contents, lost = opened
    copy, schema = scratch / f"{path.stem}.parquet", pa.schema([SCHEMA.field(name) for name in columns])
    schema = schema.with_metadata(stamped_schema().metadata)
    with pq.ParquetWriter(copy, schema, compression="zstd") as writer:
        for table in contents.tables(lost=lost):
            writer.write_table(table.select(columns).replace_schema_metadata(schema.metadata))
    return copy


@contextmanager
def _parquet(path: Path) -> Generator[pq.ParquetFile]:
    """A file of calls, open. Raises UnreadableRun, also for what goes wrong while it is read."""
    try:
        with path.open("rb") as source, pq.ParquetFile(source) as file:  # `open`, because the path may be a URL's
            check_version(path, file.schema_arrow)
            yield file
    except (pa.ArrowException, OSError) as error:
        raise UnreadableRun(f"{path} cannot be read as Parquet: {error}; move it out of the run folder") from error


def _elements(file: pq.ParquetFile, group: int) -> dict[str, int]:
    """How many elements the columns of a row group have; an empty list counts as one."""
    chunks = file.metadata.row_group(group)
    columns = [chunks.column(i) for i in range(chunks.num_columns)]
    return {column.path_in_schema.partition(".list")[0]: column.num_values for column in columns}


def _read_journal(path: Path, session_id: str | None) -> pa.Table:
    opened = _open(path)
    if opened is None:
        return SCHEMA.empty_table()
    contents, lost = opened
    tables = (_of_session(table, session_id) for table in contents.tables(lost=lost))
    return pa.concat_tables([SCHEMA.empty_table(), *tables])


def _open(path: Path) -> tuple[Contents, bool] | None:
    """A journal, and whether its writer is dead; None when it was sealed since the folder was listed.

    The rows of one that was sealed are then among the Parquet files.
    """
    lock = lock_dead(path, fcntl.LOCK_SH)
    if lock is not None:
        os.close(lock)
    try:
        return open_journal(path), lock is not None
    except FileNotFoundError:
        return None


def _read_sealed(path: Path, session_id: str | None, columns: list[str]) -> pa.Table:
    with _parquet(path) as file:
        known = [name for name in columns if name in file.schema_arrow.names]
        if session_id is None:
            return conform(file.read(known))
        found = (_session_in(file, group, session_id, known) for group in range(file.num_row_groups))
        return pa.concat_tables([SCHEMA.empty_table(), *found])


def _session_in(file: pq.ParquetFile, group: int, session_id: str, columns: list[str]) -> pa.Table:
    """One session's rows of a row group; only its names are read where it has none."""
    names = file.read_row_group(group, ["session_id"])
    if session_id not in names["session_id"].unique().to_pylist():
        return SCHEMA.empty_table()
    return _of_session(conform(file.read_row_group(group, columns)), session_id)


def _of_session(table: pa.Table, session_id: str | None) -> pa.Table:
    return table if session_id is None else table.filter(pa.array(table["session_id"].to_numpy() == session_id))


def _latest(table: pa.Table) -> pa.Table:
    """The last row of each (call_id, choice), in the order of (writer, sequence, choice)."""
    keys = table.select(["writer", "sequence", "call_id", "choice"])
    keys = keys.append_column("at", pa.array(np.arange(len(table))))
    last = keys.take(keys.group_by(["call_id", "choice"]).aggregate([("at", "max")])["at_max"])
    order = last.sort_by([(key, "ascending") for key in ("writer", "sequence", "choice")])["at"].to_numpy()
    if not len(order):
        return table
    # Slices, because `take` copies, and fails on a column of over 2 GiB of text (pyarrow 26).
    runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
    return pa.concat_tables([table.slice(run[0], len(run)) for run in runs])
