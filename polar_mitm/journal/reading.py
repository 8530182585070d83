"""All calls of a run as one table, wherever they lie at the moment.

Invariant: a (call_id, choice) is in the table once, by its last record, whatever is being written, sealed or
recovered meanwhile. This module changes nothing in the run folder.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from polar_mitm.journal.frames import UnreadableRun, check_version, conform, open_journal
from polar_mitm.journal.sealing import lock_dead
from polar_mitm.rows import SCHEMA


def read_calls(run: Path) -> pa.Table:
    """All calls of a run as rows.SCHEMA, in the order of (writer, sequence, choice), each (call_id, choice) once.

    Sealed and live journals are read. What a living writer has not finished is left out; what a dead one has not
    finished has status "lost". Raises UnreadableRun when `run` is no run folder, or for the first file in it that
    is truncated, foreign or of a later version.
    """
    if not (run / "journal").is_dir() and not (run / "calls").is_dir():
        raise UnreadableRun(f"{run} is no run folder: it has neither journal/ nor calls/")
    # Journals first: one that is sealed meanwhile is then found among the Parquet files.
    parts = [(path.stem, "journal", _read_journal(path)) for path in (run / "journal").glob("*.journal")]
    parts += [(path.stem, "calls", _read_sealed(path)) for path in (run / "calls").glob("*.parquet")]
    parts.sort(key=lambda part: part[:2])
    return _latest(pa.concat_tables([SCHEMA.empty_table(), *(table for _, _, table in parts)]))


def _read_journal(path: Path) -> pa.Table:
    lock = lock_dead(path, fcntl.LOCK_SH)
    if lock is not None:
        os.close(lock)
    try:
        contents = open_journal(path)
    except FileNotFoundError:  # sealed since the folder was listed: its rows are among the Parquet files
        return SCHEMA.empty_table()
    return pa.concat_tables([SCHEMA.empty_table(), *contents.tables(lost=lock is not None)])


def _read_sealed(path: Path) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            check_version(path, file.schema_arrow)
            return conform(file.read())
    except (pa.ArrowException, OSError) as error:
        raise UnreadableRun(f"{path} cannot be read as Parquet: {error}; move it out of the run folder") from error


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
