"""From a journal to a Parquet file that is there with all of its rows or not at all.

Invariant: the journal is removed only after its Parquet file, and the name of that file, are on stable storage; the
file's name follows from the journal's, so that sealing after a crash in between replaces it by its equal.
Whether a journal's writer lives is told by its lock, never by a process id. This module does not write journals.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from polar_mitm.journal.frames import open_journal, stamped_schema

_LOG = logging.getLogger(__name__)


def recover(run: Path) -> int:
    """Seal the journals that dead writers left in `run`; returns how many. Those of living writers stay alone.

    Raises UnreadableRun for a journal that is foreign or of a later version, OSError when sealing fails.
    """
    recovered = 0
    for path in sorted((run / "journal").glob("*.journal")):
        lock = lock_dead(path, fcntl.LOCK_EX)
        if lock is None:
            continue
        try:
            seal(path, lost=True)
        finally:
            os.close(lock)
        recovered += 1
    return recovered


def seal(path: Path, *, lost: bool) -> None:
    """Move a journal's rows into Parquet, those of unfinished calls only if `lost`. The caller holds its lock."""
    contents = open_journal(path)
    _write_parquet(path.parent.parent / "calls" / f"{path.stem}.parquet", contents.tables(lost=lost))
    if contents.torn:
        # Nothing acknowledged is behind a torn write; behind a damaged sector there may be, so the file is kept.
        _LOG.warning("%s: %d bytes behind the last valid record; kept as .torn", path, contents.torn)
        path.rename(path.with_suffix(".torn"))
    else:
        path.unlink()
    sync_folder(path.parent)


def lock_dead(path: Path, mode: int) -> int | None:
    """A locked descriptor of a journal whose writer is gone; None when the writer lives or the journal is sealed.

    `mode` is fcntl.LOCK_EX or LOCK_SH. Closing the descriptor gives the lock back.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if os.fstat(descriptor).st_nlink == 0:  # sealed between the two calls above
        os.close(descriptor)
        return None
    return descriptor


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_parquet(path: Path, tables: Iterable[pa.Table]) -> None:
    """No rows, no file."""
    temporary = path.with_suffix(".tmp")
    rows = 0
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        with pq.ParquetWriter(file, stamped_schema(), compression="zstd") as writer:
            for table in tables:
                writer.write_table(table.replace_schema_metadata(stamped_schema().metadata))
                rows += len(table)
        file.flush()
        os.fsync(file.fileno())
    if rows:
        temporary.rename(path)
    else:
        temporary.unlink()
    sync_folder(path.parent)
