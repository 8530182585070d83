"""Trajectories of a batch to packed training rows: plain columns that any trainer reads, and such rows from disk.

Invariant: every row is whole trajectories, or exact causal prefixes of them, and each trajectory of the batch is in
one row. Packing looks at a window of trajectories at a time, so that memory is bounded; which trajectories, and with
which weights, was decided before (batches.py).
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from polar_toolkit.batches import Batch, Int64s, Survey

SCHEMA_VERSION = 1
SCHEMA = pa.schema(
    [
        pa.field("schema_version", pa.int32()),
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("position_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.uint8())),
        pa.field("old_logprobs", pa.list_(pa.float32())),
        pa.field("advantages", pa.list_(pa.float32())),
        pa.field("versions", pa.list_(pa.dictionary(pa.int32(), pa.string()))),  # plain strings in files (merged.py)
        pa.field("temperature", pa.list_(pa.float32())),
        pa.field("loss_weight", pa.list_(pa.float32())),
        pa.field("session_ids", pa.list_(pa.string())),
        pa.field("group_ids", pa.list_(pa.string())),
        pa.field("trajectory_ids", pa.list_(pa.string())),
        pa.field("lengths", pa.list_(pa.int32())),
    ]
)
WINDOW_TOKENS = 2_000_000
"""Tokens that are packed at a time, unless one piece has more: what bounds memory, and a row group of the file."""
WEIGHT_SUM = "loss_weight_sum"
"""Key in a file's metadata: what the loss weights of its batch add up to."""
SUMMARY = "polar_batch"
"""Key in a file's metadata: what its batch was made of, as JSON; see `metadata`."""
_TOKENS = ("input_ids", "loss_mask", "logprobs", "versions", "temperature")
_NAMES = ("session_id", "group_id", "trajectory_id")


@dataclass(frozen=True, slots=True)
class Written:
    """A batch's file."""

    file: str
    """Its path in the merged folder."""
    rows: int
    tokens: int


def tables(seen: Survey, batch: Batch, max_tokens: int, *, window_tokens: int = WINDOW_TOKENS) -> Iterator[pa.Table]:
    """The packed rows of a batch as tables of SCHEMA, a window each. A row has at most `max_tokens` tokens."""
    window: list[_Picked] = []
    for number in np.unique(seen.piece_N[batch.members]).tolist():
        window.append(_pick(seen, batch, number))
        if sum(int(picked.lengths.sum()) for picked in window) >= window_tokens:
            yield _rows(_joined(window), max_tokens)
            window = []
    if window:
        yield _rows(_joined(window), max_tokens)


def metadata(batch: Batch, tokenizer: str | None) -> dict[str, str]:
    """What the file of a batch says of it as a whole; `tokenizer` is the fingerprint that its runs recorded."""
    sessions = sum(len(group.sessions) for group in batch.groups)
    summary = {
        "sessions": sessions,
        "groups": len(batch.groups),
        "dead_groups": sum(group.flat for group in batch.groups),
        "reward_mean": sum(group.mean * len(group.sessions) for group in batch.groups) / sessions,
        "tokenizer": tokenizer,
    }
    return {WEIGHT_SUM: repr(batch.weight_sum), SUMMARY: json.dumps(summary)}


def _pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of trajectory positions, each at most `max_tokens` long: best fit, the longest first."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        slot = bisect_left(room, (lengths[position], 0))
        left, row = room.pop(slot) if slot < len(room) else (max_tokens, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(position)
        insort(room, (left - lengths[position], row))
    return [sorted(row) for row in rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Picked:
    """Trajectories that are packed together, cut to their length."""

    tokens: dict[str, Any]
    """Per column of _TOKENS, all of them one after the other: numpy, and Arrow for versions."""
    names: pa.Table
    lengths: Int64s
    advantages: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]


def _pick(seen: Survey, batch: Batch, number: int) -> _Picked:
    """The batch's trajectories of one piece."""
    here = np.flatnonzero(seen.piece_N[batch.members] == number)
    members = batch.members[here]
    table, rows, lengths = seen.pieces[number].read([*_TOKENS, *_NAMES]), seen.row_N[members], seen.length_N[members]
    take = _spans(_list(table, "loss_mask").offsets.to_numpy()[rows], lengths)
    tokens = {name: _list(table, name).values for name in _TOKENS}
    versions = tokens["versions"]
    tokens["versions"] = versions if pa.types.is_dictionary(versions.type) else versions.dictionary_encode()
    return _Picked(
        {name: values.take(pa.array(take)) for name, values in tokens.items()},
        table.select(_NAMES).take(pa.array(rows)),
        lengths,
        batch.advantages[here],
        batch.weights[here],
    )


def _joined(window: Sequence[_Picked]) -> _Picked:
    return _Picked(
        {name: pa.concat_arrays([picked.tokens[name] for picked in window]) for name in _TOKENS},
        pa.concat_tables([picked.names for picked in window]),
        np.concatenate([picked.lengths for picked in window]),
        np.concatenate([picked.advantages for picked in window]),
        np.concatenate([picked.weights for picked in window]),
    )


def _rows(picked: _Picked, max_tokens: int) -> pa.Table:
    rows = _pack(picked.lengths.tolist(), max_tokens)
    order = np.array([position for row in rows for position in row], np.int64)
    lengths = picked.lengths[order]
    take = _spans((np.cumsum(picked.lengths) - picked.lengths)[order], lengths)
    members, tokens = _offsets(map(len, rows)), _offsets(int(picked.lengths[row].sum()) for row in rows)
    mask = picked.tokens["loss_mask"].to_numpy()[take]

    def per_token(values: Any, kind: pa.DataType) -> pa.Array:  # Any: a numpy array
        return pa.ListArray.from_arrays(tokens, pa.array(values, kind))

    def taken(name: str) -> pa.Array:
        return pa.ListArray.from_arrays(tokens, picked.tokens[name].take(pa.array(take)))

    def per_trajectory(name: str) -> pa.Array:
        return pa.ListArray.from_arrays(members, picked.names[name].combine_chunks().take(pa.array(order)))

    columns: dict[str, pa.Array] = {
        "schema_version": pa.array([SCHEMA_VERSION] * len(rows), pa.int32()),
        "input_ids": taken("input_ids"),
        "position_ids": per_token(_spans(np.zeros_like(lengths), lengths), pa.int32()),
        "loss_mask": per_token(mask, pa.uint8()),
        "old_logprobs": taken("logprobs"),
        "advantages": per_token(np.repeat(picked.advantages[order], lengths) * mask, pa.float32()),
        "versions": taken("versions"),
        "temperature": taken("temperature"),
        "loss_weight": per_token(np.repeat(picked.weights[order], lengths) * mask, pa.float32()),
        "session_ids": per_trajectory("session_id"),
        "group_ids": per_trajectory("group_id"),
        "trajectory_ids": per_trajectory("trajectory_id"),
        "lengths": pa.ListArray.from_arrays(members, pa.array(lengths, pa.int32())),
    }
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _spans(starts: Int64s, lengths: Int64s) -> Int64s:
    """Positions start, start + 1 ... of each span, one span after the other."""
    firsts = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum())) + np.repeat(starts - firsts, lengths)


def _offsets(counts: Iterable[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *counts]), pa.int32())


def _list(table: pa.Table, name: str) -> pa.ListArray:
    column = table[name].combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
