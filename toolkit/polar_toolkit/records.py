"""Plain records of other systems, one a call: prompt ids, output ids and log-probabilities under the names they use.

Invariant: a record is taken as it is or named as bad, with the reason; nothing in it is repaired or guessed. JSONL and
Parquet give the same values. Nothing is written here (importing.py).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from polar_toolkit.calls import Float32s, Int32s
from polar_toolkit.errors import Refusal, UnreadableFile
from polar_toolkit.prompts import LOGPROB_ROUNDING

Raw = Mapping[str, Any]  # Any: JSON or Parquet values, judged by parse
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt_ids": ("prompt_ids", "prompt_token_ids"),
    "output_ids": (
        "output_ids", "output_token_ids", "completion_ids", "completion_token_ids", "response_ids",
        "response_token_ids", "generation_token_ids",
    ),
    "logprobs": (
        "logprobs", "output_log_probs", "output_logprobs", "completion_logprobs", "generation_log_probs",
        "generation_logprobs", "response_logprobs", "rollout_log_probs", "old_log_probs", "per_token_logps",
    ),
    "mask": ("response_mask", "completion_mask", "loss_mask", "env_mask"),
    "call_id": ("call_id", "trace_id", "model_call_id"),
    "choice": ("choice",),
    "session_id": ("session_id", "rollout_id", "trajectory_id"),
    "group_id": ("group_id", "uid", "group_index", "task_id"),
    "thread_id": ("thread_id",),
    "kind": ("kind",),
    "reward": ("reward", "reward_score"),
    "version": ("weight_version", "model_version"),
    "temperature": ("temperature",),
    "order": ("sequence", "order", "turn_index", "timestamp", "created_at"),
}  # fmt: skip
"""What a value may be called; of several names in one record the first counts."""

_ROWS = 32
"""Of Parquet, read at once: a row may hold a prompt of 100,000 tokens."""
_INT32 = np.iinfo(np.int32)


class BadRecord(ValueError):
    """A record that cannot be taken; the message is the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One call. What a record does not say is None."""

    prompt_ids: Int32s
    output_ids: Int32s
    logprobs: Float32s
    call_id: str | None
    choice: int
    session_id: str | None
    group_id: str | None
    thread_id: str | None
    kind: str | None
    version: str | None
    temperature: float | None
    reward: float | None
    order: int | None
    """A position, or a time in ns: calls are ordered by it."""


def read(path: Path) -> Iterator[tuple[int, Raw | str]]:
    """The records of a .jsonl or .parquet file with their line or row, from 1; in place of a broken one, why.

    Raises Refusal for another kind of file, UnreadableFile for broken Parquet.
    """
    if not path.is_file():
        raise Refusal(f"{path} does not exist; give .jsonl or .parquet files, one record a call")
    if path.suffix == ".jsonl":
        return _json_lines(path)
    if path.suffix == ".parquet":
        return _rows(path)
    raise Refusal(f"{path} is neither .jsonl nor .parquet; give one record a call in one of these")


def parse(raw: Raw) -> Record:
    """A record with its values checked. Raises BadRecord."""
    prompt_ids, output_ids = _ids(raw, "prompt_ids"), _ids(raw, "output_ids")
    if len(output_ids) and not len(prompt_ids):
        raise BadRecord("the prompt is empty")
    _refuse_mask(raw, len(output_ids))
    return Record(
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        logprobs=_logprobs(raw, len(output_ids)),
        call_id=_name(raw, "call_id"),
        choice=_whole(raw, "choice") or 0,
        session_id=_name(raw, "session_id"),
        group_id=_name(raw, "group_id"),
        thread_id=_name(raw, "thread_id"),
        kind=_name(raw, "kind"),
        version=_name(raw, "version"),
        temperature=_number(raw, "temperature", above=0.0),
        reward=_number(raw, "reward"),
        order=_order(raw),
    )


def _json_lines(path: Path) -> Iterator[tuple[int, Raw | str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = orjson.loads(line)
            except ValueError as error:  # broken JSON or UTF-8: the caller lists the line
                yield number, f"not JSON: {error}"
                continue
            yield number, value if isinstance(value, dict) else f"not a JSON object but {type(value).__name__}"


def _rows(path: Path) -> Iterator[tuple[int, Raw | str]]:
    known = {name for names in NAMES.values() for name in names}
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in known]
            number = 1
            for batch in file.iter_batches(_ROWS, columns=columns):
                for row in _plain(batch):
                    yield number, row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise UnreadableFile(f"{path} cannot be read as Parquet ({error}); write it again or leave it out") from error


def _plain(batch: pa.RecordBatch) -> Iterable[Raw]:
    """Rows as dicts: lists of numbers as numpy views, everything else as Python values."""
    columns = [
        _views(column) if _holds_numbers(column.type) else column.to_pylist()
        for column in (batch.column(name) for name in batch.schema.names)
    ]
    if not columns:  # none of the names is known: each row is bad for what it lacks
        return [{}] * batch.num_rows
    return (dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True))


def _holds_numbers(kind: pa.DataType) -> bool:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return listed and (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type))


def _views(column: pa.ListArray) -> list[npt.NDArray[Any] | None]:  # Any: the column's own number type
    missing = math.nan if pa.types.is_floating(column.type.value_type) else 0
    holes = column.values.is_null().to_numpy(zero_copy_only=False) if column.values.null_count else None
    filled = column.values if holes is None else column.values.fill_null(missing)
    values = filled.to_numpy(zero_copy_only=False)
    if holes is not None and not np.issubdtype(values.dtype, np.floating):
        values = np.where(holes, -1, values.astype(np.int64))  # never an id, so that the record is named as bad
    spans = pairwise(column.offsets.to_pylist())
    valid = column.is_valid().to_pylist()
    return [values[start:end] if there else None for (start, end), there in zip(spans, valid, strict=True)]


def _get(raw: Raw, field: str) -> tuple[str, Any]:  # Any: a JSON or Parquet value
    """The name that the record uses for a field, and its value; the first name and None when it has none."""
    found = next((name for name in NAMES[field] if raw.get(name) is not None), None)
    return (NAMES[field][0], None) if found is None else (found, raw[found])


def _numbers(raw: Raw, field: str) -> tuple[str, npt.NDArray[Any]]:  # Any: an integer or float type
    name, value = _get(raw, field)
    if value is None:
        raise BadRecord(f"no {field}: none of {', '.join(NAMES[field])}")
    if not isinstance(value, list | np.ndarray):
        raise BadRecord(f"{name} is {type(value).__name__}, not a list of numbers")
    try:
        numbers = np.asarray(value)
    except ValueError as error:  # lists of several depths
        raise BadRecord(f"{name} is no flat list of numbers") from error
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iuf"):
        raise BadRecord(f"{name} is no flat list of numbers")
    return name, numbers


def _ids(raw: Raw, field: str) -> Int32s:
    name, numbers = _numbers(raw, field)
    if len(numbers) and numbers.dtype.kind == "f":
        raise BadRecord(f"{name} holds {numbers.dtype}, not integers")
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() <= _INT32.max):
        raise BadRecord(f"{name} holds an id outside 0 .. {_INT32.max}")
    return numbers.astype(np.int32)


def _logprobs(raw: Raw, length: int) -> Float32s:
    name, numbers = _numbers(raw, "logprobs")
    logprobs = numbers.astype(np.float32)
    if len(logprobs) != length:
        raise BadRecord(f"{len(logprobs)} {name} for {length} sampled tokens")
    if length and not (logprobs.max() <= LOGPROB_ROUNDING and logprobs.min() > -np.inf):  # a NaN fails both
        raise BadRecord(f"{name} holds a value above 0 or none that is finite")
    return logprobs


def _refuse_mask(raw: Raw, length: int) -> None:
    """A mask that leaves out output tokens marks them as not sampled: the record joins several calls."""
    if _get(raw, "mask")[1] is None:
        return
    name, mask = _numbers(raw, "mask")
    if not mask[max(0, len(mask) - length) :].all():
        raise BadRecord(f"{name} leaves out output tokens: the record joins several calls; give one record a call")


def _name(raw: Raw, field: str) -> str | None:
    name, value = _get(raw, field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadRecord(f"{name} is {value!r}, not a name")
    return str(value)


def _whole(raw: Raw, field: str) -> int | None:
    name, value = _get(raw, field)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _INT32.max):
        raise BadRecord(f"{name} is {value!r}, not a whole number from 0")
    return value


def _number(raw: Raw, field: str, above: float = -math.inf) -> float | None:
    name, value = _get(raw, field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
        raise BadRecord(f"{name} is {value!r}, not a finite number" + (f" above {above:g}" if above == 0 else ""))
    return float(value)


def _order(raw: Raw) -> int | None:
    """Whole numbers as they are; seconds, dates and ISO 8601 text as ns since 1970."""
    name, value = _get(raw, "order")
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError as error:
            raise BadRecord(f"{name} is {value!r}, neither a number nor an ISO 8601 time") from error
    if isinstance(value, datetime.datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
        value = aware.timestamp()
    if isinstance(value, float) and math.isfinite(value):
        value = round(value * 1e9)
    if isinstance(value, bool) or not isinstance(value, int) or not abs(value) < 1 << 63:
        raise BadRecord(f"{name} is {value!r}, neither a number nor an ISO 8601 time")
    return value
