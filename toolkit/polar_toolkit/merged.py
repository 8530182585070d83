"""The merged folder: trajectories/, batches/ and report.json, replaced as a whole or not at all.

Invariant: the folder carries a marker; a folder without it is somebody else's and is never replaced, and a merge that
fails leaves the earlier one as it was. What the files hold is decided elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polar_toolkit import trajectories
from polar_toolkit.errors import Refusal, UnreadableFile

MARKER = ".polar-merged"
_PART = "part-00000.parquet"


@contextmanager
def replacing(folder: Path) -> Generator[Path]:
    """An empty folder to fill, which takes the place of `folder` when the block ends well.

    Raises Refusal when `folder` exists and is not a merged folder.
    """
    refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (fresh / MARKER).write_text("derived by polar-toolkit merge; replaced as a whole by the next one\n")
        yield fresh
        _put_in_place(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def refuse_foreign(folder: Path) -> None:
    """Raises Refusal when `folder` exists, is not empty, and was not made by a merge."""
    if folder.is_dir() and ((folder / MARKER).is_file() or not any(folder.iterdir())):
        return
    if folder.exists():
        raise Refusal(f"{folder} exists and was not made by polar-toolkit merge; move it away or give --out")


def write_trajectories(folder: Path) -> pq.ParquetWriter:
    """A writer of trajectories.SCHEMA; close it before reading."""
    path = folder / "trajectories"
    path.mkdir()
    return pq.ParquetWriter(path / _PART, trajectories.SCHEMA, compression="zstd")


def write_batches(folder: Path, table: pa.Table) -> None:
    """Write the packed rows."""
    path = folder / "batches"
    path.mkdir()
    pq.write_table(table, path / _PART, compression="zstd")


def write_report(folder: Path, report: dict[str, Any]) -> None:  # Any: JSON values
    """Write report.json."""
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def read_trajectories(folder: Path) -> pa.Table:
    """All trajectories of a merged folder. Raises Refusal when there are none, UnreadableFile for a bad file."""
    paths = sorted((folder / "trajectories").glob("*.parquet"))
    if not (folder / MARKER).is_file() or not paths:
        raise Refusal(f"{folder} holds no trajectories; make them with: polar-toolkit merge {folder.parent}")
    return pa.concat_tables([_read(path) for path in paths])


def read_report(folder: Path) -> dict[str, Any]:  # Any: JSON values
    """The contents of report.json. Raises UnreadableFile."""
    path = folder / "report.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"{path} cannot be read ({error}); make it with: polar-toolkit merge") from error


def _read(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UnreadableFile(f"{path} is truncated or not Parquet ({error}); run polar-toolkit merge again") from error
    if not table.schema.equals(trajectories.SCHEMA):
        raise UnreadableFile(f"{path} is not a file of trajectories; remove it or run polar-toolkit merge again")
    return table


def _put_in_place(fresh: Path, folder: Path) -> None:
    """Two renames: between them the folder is missing, but both the old and the new one are whole on disk."""
    if not folder.exists():
        fresh.rename(folder)
        return
    aside = folder.with_name(f".{folder.name}-old-{os.getpid()}")
    folder.rename(aside)
    fresh.rename(folder)
    shutil.rmtree(aside)
