"""The merged folder: trajectories/, batches/, sessions.parquet, report.json and a card, replaced as a whole.

Invariant: the folder carries a marker; a folder without it is somebody else's and is never replaced. A merge that
fails leaves the earlier one as it was. What the files hold is decided elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, cast
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from upath import UPath

from polar_toolkit import trajectories
from polar_toolkit.errors import Refusal, UnreadableFile
from polar_toolkit.locations import is_remote

MARKER = ".polar-merged"
MARKERS = {"merge": MARKER, "export": ".polar-export"}
"""The file by which a folder is known as a command's own."""
_SESSIONS = "sessions.parquet"
GROUP_TOKENS = 1_000_000
"""Tokens of a row group, unless one row has more."""


@contextmanager
def replacing(folder: Path, command: str = "merge") -> Generator[Path]:
    """An empty folder to fill, which takes the place of `folder` when the block ends well.

    On an object store, where nothing can be renamed, it is copied into place: meanwhile a reader finds `folder`
    without its marker, which comes last, and with files missing; before and after it is whole. Raises Refusal when
    `folder` exists and was not made by the command.
    """
    refuse_foreign(folder, command)
    fresh = _fresh(folder, command)
    try:
        yield fresh
        if is_remote(folder):
            _copy_in_place(fresh, folder, command)
        else:
            _rename_in_place(fresh, folder)
    finally:
        _remove(fresh)


def refuse_foreign(folder: Path, command: str = "merge") -> None:
    """Raises Refusal when `folder` exists, is not empty, and was not made by the command."""
    if folder.is_dir() and ((folder / MARKERS[command]).is_file() or not any(folder.iterdir())):
        return
    if folder.exists():
        raise Refusal(
            f"{folder} exists and was not made by polar-toolkit {command}; move it away or give another --out"
        )


class Rows:
    """Writes tables of one schema to a Parquet file, in the order given; without a table there is no file.

    In the file every column has a plain type: what is a dictionary in memory is strings there.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._metadata = metadata
        self._file: IO[bytes] | None = None
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._file is not None:
            self._file.close()

    def write(self, table: pa.Table) -> None:
        """Append a table as a row group."""
        if self._writer is None:
            self._path.parent.mkdir(exist_ok=True)
            self._file = cast(IO[bytes], self._path.open("wb"))  # a URL's file is typed as none in particular
            self._writer = pq.ParquetWriter(self._file, table.schema, **_form(table.schema))
            self._writer.add_key_value_metadata(self._metadata or {})
        self._writer.write_table(table)


def trajectory_part(folder: Path, number: int) -> Path:
    """Path of a part of the trajectories."""
    return folder / "trajectories" / f"part-{number:05d}.parquet"


def batch_file(folder: Path, number: int) -> Path:
    """Path of a batch."""
    return folder / "batches" / f"batch-{number:05d}.parquet"


def write_report(folder: Path, report: dict[str, Any]) -> None:  # Any: JSON values
    """Write report.json."""
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def write_sessions(folder: Path, table: pa.Table) -> None:
    """Write sessions.parquet: what became of each session (ledger.Ledger.sessions)."""
    with (folder / _SESSIONS).open("wb") as sink:  # `open`, because the path may be a URL's
        pq.write_table(table, sink)


def read_sessions(folder: Path) -> pa.Table:
    """The contents of sessions.parquet. Raises UnreadableFile."""
    path = folder / _SESSIONS
    try:
        with path.open("rb") as source:
            return pq.read_table(source)
    except (OSError, pa.ArrowInvalid) as error:
        raise UnreadableFile(f"{path} cannot be read ({error}); make it with: polar-toolkit merge") from error


def write_card(folder: Path, text: str) -> None:
    """Write README.md."""
    (folder / "README.md").write_text(text)


@dataclass(frozen=True, slots=True)
class Piece:
    """A row group of trajectories: what is in memory at a time."""

    path: Path
    group: int

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Some columns of it, as in trajectories.SCHEMA. Raises UnreadableFile."""
        with _parquet(self.path, coded=["versions.list.element"]) as file:  # as strings it takes five times as long
            return file.read_row_group(self.group, list(columns), use_threads=False)


def trajectory_pieces(folder: Path) -> list[Piece]:
    """All row groups of a merged folder's trajectories, in order.

    Raises Refusal when there are none, UnreadableFile for a bad file.
    """
    paths = sorted((folder / "trajectories").glob("*.parquet"))
    if not (folder / MARKER).is_file() or not paths:
        raise Refusal(f"{folder} holds no trajectories; make them with: polar-toolkit merge {folder.parent}")
    return [Piece(path, group) for path in paths for group in range(_row_groups(path))]


def read_trajectories(folder: Path) -> pa.Table:
    """All trajectories of a merged folder as one table, as `Piece.read` gives them. Raises as `trajectory_pieces`."""
    pieces = [piece.read(trajectories.SCHEMA.names) for piece in trajectory_pieces(folder)]
    return pa.concat_tables([trajectories.SCHEMA.empty_table(), *pieces])


def read_report(folder: Path) -> dict[str, Any]:  # Any: JSON values
    """The contents of report.json. Raises UnreadableFile."""
    path = folder / "report.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"{path} cannot be read ({error}); make it with: polar-toolkit merge") from error


@contextmanager
def _parquet(path: Path, coded: Sequence[str] = ()) -> Generator[pq.ParquetFile]:
    """A file, open; the columns of texts in `coded` come as dictionaries."""
    try:
        with path.open("rb") as source, pq.ParquetFile(source, read_dictionary=[*coded]) as file:  # `open`: URLs, too
            yield file
    except (OSError, pa.ArrowInvalid) as error:
        raise UnreadableFile(f"{path} is truncated or not Parquet ({error}); run polar-toolkit merge again") from error


def _row_groups(path: Path) -> int:
    with _parquet(path) as file:
        if not file.schema_arrow.equals(_stored(trajectories.SCHEMA)):
            raise UnreadableFile(f"{path} is not a file of trajectories; remove it or run polar-toolkit merge again")
        return file.num_row_groups


def _stored(schema: pa.Schema) -> pa.Schema:
    """A schema as files have it: a dictionary of strings is strings."""
    strings, coded = pa.list_(pa.string()), pa.list_(pa.dictionary(pa.int32(), pa.string()))
    return pa.schema([field.with_type(strings) if field.type == coded else field for field in schema])


def _form(schema: pa.Schema) -> dict[str, Any]:  # Any: keyword arguments of ParquetWriter
    """How a table is stored: measured on 8 million tokens, where the defaults take twice the time.

    A dictionary is for texts; numbers are faster and as small without one, also those that are nearly all equal.
    Statistics of tokens cost time and select nothing.
    """
    lists = [field for field in schema if pa.types.is_list(field.type)]
    texts = [f"{field.name}.list.element" for field in lists if not pa.types.is_primitive(field.type.value_type)]
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": texts + [field.name for field in schema if pa.types.is_string(field.type)],
        "write_statistics": [field.name for field in schema if field not in lists],
        "store_schema": False,
    }


def _fresh(folder: Path, command: str) -> Path:
    if is_remote(folder):
        fresh = folder.with_name(f".{folder.name}-{uuid4().hex}")
        fresh.mkdir(parents=True)
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    _mark(fresh, command)
    return fresh


def _rename_in_place(fresh: Path, folder: Path) -> None:
    """Two renames: between them the folder is missing, but both the old and the new one are whole on disk."""
    if not folder.exists():
        fresh.rename(folder)
        return
    aside = folder.with_name(f".{folder.name}-old-{os.getpid()}")
    folder.rename(aside)
    fresh.rename(folder)
    shutil.rmtree(aside)


def _copy_in_place(fresh: Path, folder: Path, command: str) -> None:
    """The marker goes first and comes last, so that a folder with it is whole."""
    if folder.exists():
        (folder / MARKERS[command]).unlink(missing_ok=True)
        _remove(folder)
    for path in sorted(path for path in fresh.rglob("*") if path.is_file() and path.name != MARKERS[command]):
        target = folder.joinpath(*path.relative_to(fresh).parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        _store(fresh).copy(_key(path), _key(target))
    _mark(folder, command)


def _mark(folder: Path, command: str) -> None:
    (folder / MARKERS[command]).write_text(f"derived by polar-toolkit {command}; replaced as a whole by the next one\n")


def _remove(folder: Path) -> None:
    if is_remote(folder):
        if folder.exists():
            _store(folder).rm(_key(folder), recursive=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _store(path: Path) -> Any:  # Any: fsspec's file system, which has no types
    return cast(UPath, path).fs


def _key(path: Path) -> str:
    return cast(UPath, path).path
