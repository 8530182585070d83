"""Trajectories with rewards to packed training rows: plain columns that any trainer reads.

Invariant: the loss weights of a batch add up to 1 and every row is whole trajectories, or exact causal prefixes of
them; what is left out is counted under a reason. Which tokens are on the mask was decided before (trajectories.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from polar_toolkit.advantages import Group, of_sessions
from polar_toolkit.calls import SessionKey

SCHEMA_VERSION = 1
SCHEMA = pa.schema(
    [
        pa.field("schema_version", pa.int32()),
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("position_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.uint8())),
        pa.field("old_logprobs", pa.list_(pa.float32())),
        pa.field("advantages", pa.list_(pa.float32())),
        pa.field("versions", pa.list_(pa.string())),
        pa.field("temperature", pa.list_(pa.float32())),
        pa.field("loss_weight", pa.list_(pa.float32())),
        pa.field("session_ids", pa.list_(pa.string())),
        pa.field("group_ids", pa.list_(pa.string())),
        pa.field("trajectory_ids", pa.list_(pa.string())),
        pa.field("lengths", pa.list_(pa.int32())),
    ]
)
Weighting = Literal["token", "session"]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Options:
    """How trajectories become rows."""

    max_tokens: int = 8192
    """Length limit of a packed row, in tokens; a longer trajectory keeps its beginning."""
    weighting: Weighting = "token"
    """Whether each trained token, or each session, weighs the same."""
    drop_zero_variance: bool = False
    """Leave out groups whose rewards are all equal; otherwise their tokens stay with advantage 0."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows and what became of the trainable tokens."""

    table: pa.Table
    """Schema SCHEMA; no rows when nothing could be trained."""
    trained: int
    """Tokens on the loss mask."""
    left_out: dict[str, int]
    """Trainable tokens that are not on the mask, by reason: no_reward, zero_variance, truncated."""
    flat_tokens: int
    """Tokens on the mask with advantage 0, because their group's rewards are equal."""
    groups: list[Group]


def build(trajectories: pa.Table, options: Options) -> Batch:
    """The batch of a table of trajectories.SCHEMA; trajectories without a reward are left out."""
    table = trajectories.combine_chunks()
    sessions = list(zip(table["run_id"].to_pylist(), table["session_id"].to_pylist(), strict=True))
    rewards = {s: r for s, r in zip(sessions, table["reward"].to_pylist(), strict=True) if r is not None}
    group_ids = dict(zip(sessions, table["group_id"].to_pylist(), strict=True))
    advantages, groups = of_sessions(rewards, group_ids)
    flat = {session for group in groups if group.flat for session in group.sessions}
    dropped = flat if options.drop_zero_variance else set[SessionKey]()

    starts, lengths, full_T, cut_T = _mask_counts(table, options.max_tokens)
    in_T = np.array([s in rewards and s not in dropped for s in sessions], bool)
    kept = np.flatnonzero(in_T & (cut_T > 0))
    flat_T = np.array([s in flat for s in sessions], bool)
    left_out = {
        "no_reward": int(sum(full_T[i] for i, s in enumerate(sessions) if s not in rewards)),
        "zero_variance": int(sum(full_T[i] for i, s in enumerate(sessions) if s in dropped)),
        "truncated": int((full_T - cut_T)[in_T].sum()),
    }
    picked = _Picked(
        table=table,
        order=kept,
        starts=starts[kept],
        lengths=lengths[kept],
        advantages=np.array([advantages[sessions[i]] for i in kept], np.float64),
        weights=_weights(cut_T[kept], [sessions[i] for i in kept], options.weighting),
    )
    rows = _pack(picked.lengths.tolist(), options.max_tokens)
    return Batch(
        table=_rows(picked, rows),
        trained=int(cut_T[kept].sum()),
        left_out={reason: count for reason, count in left_out.items() if count},
        flat_tokens=int(cut_T[kept][flat_T[kept]].sum()),
        groups=groups,
    )


def _mask_counts(table: pa.Table, max_tokens: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Per trajectory: first position in the flat columns, length after truncation, mask sum before and after it."""
    offsets = _lists(table, "loss_mask").offsets.to_numpy().astype(np.int64)
    sums = np.concatenate([[0], np.cumsum(_values(table, "loss_mask"), dtype=np.int64)])
    starts, ends = offsets[:-1], offsets[1:]
    cut_ends = np.minimum(ends, starts + max_tokens)
    return starts, cut_ends - starts, sums[ends] - sums[starts], sums[cut_ends] - sums[starts]


def _weights(trained: Int64s, sessions: Sequence[SessionKey], weighting: Weighting) -> npt.NDArray[np.float64]:
    """The loss weight of each trained token of a trajectory, so that all weights of the batch add up to 1."""
    if weighting == "token" or not len(trained):
        return np.full(len(trained), 1.0 / max(1, int(trained.sum())))
    _, session_of = np.unique(np.array(["\0".join(s) for s in sessions]), return_inverse=True)
    totals = np.bincount(session_of, weights=trained)
    return 1.0 / (len(totals) * totals[session_of])


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
    table: pa.Table
    order: Int64s
    """Rows of `table` that are packed; the other arrays have one element for each."""
    starts: Int64s
    lengths: Int64s
    advantages: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]


def _rows(picked: _Picked, rows: list[list[int]]) -> pa.Table:
    order = np.array([position for row in rows for position in row], np.int64)
    lengths = picked.lengths[order]
    firsts = np.cumsum(lengths) - lengths
    positions = np.arange(int(lengths.sum())) - np.repeat(firsts, lengths)
    take = np.repeat(picked.starts[order], lengths) + positions
    members = _offsets([len(row) for row in rows])
    tokens = _offsets([int(picked.lengths[row].sum()) for row in rows])
    mask = _values(picked.table, "loss_mask")[take]

    def per_token(values: Any, kind: pa.DataType) -> pa.Array:  # Any: a numpy or an Arrow array
        return pa.ListArray.from_arrays(tokens, pa.array(values, kind) if isinstance(values, np.ndarray) else values)

    def per_trajectory(name: str) -> pa.Array:
        return pa.ListArray.from_arrays(
            members, picked.table[name].combine_chunks().take(pa.array(picked.order[order]))
        )

    columns: dict[str, pa.Array] = {
        "schema_version": pa.array([SCHEMA_VERSION] * len(rows), pa.int32()),
        "input_ids": per_token(_values(picked.table, "input_ids")[take], pa.int32()),
        "position_ids": per_token(positions, pa.int32()),
        "loss_mask": per_token(mask, pa.uint8()),
        "old_logprobs": per_token(_values(picked.table, "logprobs")[take], pa.float32()),
        "advantages": per_token(np.repeat(picked.advantages[order], lengths) * mask, pa.float32()),
        "versions": per_token(_lists(picked.table, "versions").values.take(pa.array(take)), pa.string()),
        "temperature": per_token(_values(picked.table, "temperature")[take], pa.float32()),
        "loss_weight": per_token(np.repeat(picked.weights[order], lengths) * mask, pa.float32()),
        "session_ids": per_trajectory("session_id"),
        "group_ids": per_trajectory("group_id"),
        "trajectory_ids": per_trajectory("trajectory_id"),
        "lengths": pa.ListArray.from_arrays(members, pa.array(lengths, pa.int32())),
    }
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _offsets(counts: Sequence[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *counts]), pa.int32())


def _lists(table: pa.Table, name: str) -> pa.ListArray:
    column = table[name].combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def _values(table: pa.Table, name: str) -> npt.NDArray[Any]:  # Any: the column's element type
    return _lists(table, name).values.to_numpy()
