"""Parquet and JSON lines, written as the rows come.

Invariant: a few rows are in memory at a time, whatever their number. Whose the folder is, is settled elsewhere
(merged.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import batched
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

_ROWS = 32
"""Rows that are in memory at a time."""


def write_table(path: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> None:  # Any: by the schema
    """Rows as Parquet; a value of a list column may be a numpy array."""
    with path.open("wb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for some in batched(rows, _ROWS):
            columns = [pa.array([row[name] for row in some], schema.field(name).type) for name in schema.names]
            writer.write_table(pa.table(columns, schema=schema))


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:  # Any: JSON values
    """Rows as JSON lines; a list may be a numpy array. Text must be whole characters."""
    with path.open("wb") as file:
        for row in rows:
            file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
