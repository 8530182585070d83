"""Which trajectories stand in which batch, with which advantage and weight, and what is left out for which reason.

Invariant: a filter takes whole sessions, or the end of a trajectory, so that no token's owner is dropped while another
trajectory that holds the token stays; each batch's loss weights add up to its `weight_sum`, which is 1 unless the
weighting is `constant`. It reads scalar columns and loss masks, a piece at a time; rows are made elsewhere (packed.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from polar_toolkit.advantages import Advantage, Group, of_sessions
from polar_toolkit.calls import SessionKey

Weighting = Literal["token", "session", "constant"]
Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Options:
    """How trajectories become batches."""

    max_tokens: int = 8192
    """Length limit of a packed row, in tokens; a longer trajectory keeps its beginning."""
    weighting: Weighting = "token"
    """token and session: each trained token, or each session, weighs the same, and all together 1. constant: each
    token weighs 1 / (max_tokens x sessions), so that a long session is not made to count less per token: the
    normalisation of Dr. GRPO (Liu et al. 2025, section 3.2), by a constant in place of the response's length."""
    drop_zero_variance: bool = False
    """Leave out groups whose rewards are all equal; otherwise their tokens stay with advantage 0."""
    advantage: Advantage = "grpo"
    groups: int | None = None
    """Groups of a batch; all in one batch unless given."""


class Piece(Protocol):
    """Some trajectories, in memory only while they are looked at."""

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Columns of trajectories.SCHEMA; versions may be strings."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What is known of all trajectories without their tokens. Sequences and arrays have one element each."""

    pieces: Sequence[Piece]
    piece_N: Int64s
    """Which piece holds it."""
    row_N: Int64s
    """Its row there."""
    sessions: list[SessionKey]
    group_ids: Mapping[SessionKey, str | None]
    rewards: Mapping[SessionKey, float]
    length_N: Int64s
    """Tokens, after truncation."""
    full_N: Int64s
    """Tokens on the mask before truncation."""
    trained_N: Int64s
    """Tokens on the mask after truncation."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One batch. Arrays have one element a trajectory."""

    members: Int64s
    """Its trajectories, as places in the survey, ascending."""
    advantages: Float64s
    weights: Float64s
    """Of each trained token."""
    weight_sum: float
    groups: tuple[Group, ...]
    trained: int
    """Tokens on the loss mask."""
    flat_tokens: int
    """Tokens on the mask with advantage 0, because their group's rewards are equal."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All batches, and what became of the trainable tokens that are in none."""

    batches: tuple[Batch, ...]
    left_out: dict[str, int]
    """Tokens by reason: no_reward, zero_variance, truncated."""
    groups: tuple[Group, ...]
    """Of all rewarded sessions that have a trajectory, sorted by name."""


def survey(pieces: Sequence[Piece], max_tokens: int) -> Survey:
    """Look at all trajectories, one piece at a time."""
    places: list[tuple[int, int]] = []
    counts: list[Int64s] = [np.empty((0, 3), np.int64)]
    sessions: list[SessionKey] = []
    group_ids: dict[SessionKey, str | None] = {}
    rewards: dict[SessionKey, float] = {}
    for number, piece in enumerate(pieces):
        table = piece.read(["run_id", "session_id", "group_id", "reward", "loss_mask"])
        counts.append(_counts(table, max_tokens))
        for row, (run, session, group, reward) in enumerate(
            zip(*(table[name].to_pylist() for name in ("run_id", "session_id", "group_id", "reward")), strict=True)
        ):
            places.append((number, row))
            sessions.append((run, session))
            group_ids[run, session] = group
            if reward is not None:
                rewards[run, session] = reward
    place_N, count_N = np.array(places, np.int64).reshape(-1, 2), np.concatenate(counts)
    return Survey(
        pieces, place_N[:, 0], place_N[:, 1], sessions, group_ids, rewards, count_N[:, 0], count_N[:, 1], count_N[:, 2]
    )


def plan(seen: Survey, options: Options) -> Plan:
    """Assign trajectories to batches; those without a reward are left out."""
    advantages, groups = of_sessions(seen.rewards, seen.group_ids, options.advantage)
    flat = {session for group in groups if group.flat for session in group.sessions}
    dropped = flat if options.drop_zero_variance else set[SessionKey]()
    in_N = np.array([s in seen.rewards and s not in dropped for s in seen.sessions], bool)
    kept = np.flatnonzero(in_N & (seen.trained_N > 0))
    left_out = {
        "no_reward": int(sum(seen.full_N[i] for i, s in enumerate(seen.sessions) if s not in seen.rewards)),
        "zero_variance": int(sum(seen.full_N[i] for i, s in enumerate(seen.sessions) if s in dropped)),
        "truncated": int((seen.full_N - seen.trained_N)[in_N].sum()),
    }
    return Plan(
        tuple(
            _batch(seen, members, part, advantages, options) for members, part in _parts(seen, kept, groups, options)
        ),
        {reason: count for reason, count in left_out.items() if count},
        tuple(groups),
    )


def _counts(table: pa.Table, max_tokens: int) -> Int64s:
    """Per trajectory: length after truncation, mask sum before and after it; int64 [N, 3]."""
    masks: pa.ListArray = table["loss_mask"].combine_chunks()
    masks = masks.chunk(0) if isinstance(masks, pa.ChunkedArray) else masks
    offsets = masks.offsets.to_numpy().astype(np.int64)
    sums = np.concatenate([[0], np.cumsum(masks.values.to_numpy(), dtype=np.int64)])
    starts, ends = offsets[:-1], offsets[1:]
    cut_ends = np.minimum(ends, starts + max_tokens)
    return np.stack([cut_ends - starts, sums[ends] - sums[starts], sums[cut_ends] - sums[starts]], axis=1)


def _parts(
    seen: Survey, kept: Int64s, groups: Sequence[Group], options: Options
) -> Iterator[tuple[Int64s, tuple[Group, ...]]]:
    """The trajectories and the groups of each batch, groups in order of their first trajectory."""
    group_of = {session: group for group in groups for session in group.sessions}
    members: dict[str, list[int]] = {}
    for index in kept.tolist():
        members.setdefault(group_of[seen.sessions[index]].group_id, []).append(index)
    by_name = {group.group_id: group for group in groups}
    for names in batched(members, options.groups or max(1, len(members))):
        indices = sorted(index for name in names for index in members[name])
        yield np.array(indices, np.int64), tuple(by_name[name] for name in names)


def _batch(
    seen: Survey,
    members: Int64s,
    groups: tuple[Group, ...],
    advantages: Mapping[SessionKey, float],
    options: Options,
) -> Batch:
    sessions, trained = [seen.sessions[index] for index in members], seen.trained_N[members]
    weights = _weights(trained, sessions, options)
    flat = {session for group in groups if group.flat for session in group.sessions}
    return Batch(
        members=members,
        advantages=np.array([advantages[session] for session in sessions], np.float64),
        weights=weights,
        weight_sum=float((weights * trained).sum()),
        groups=groups,
        trained=int(trained.sum()),
        flat_tokens=int(trained[np.array([session in flat for session in sessions], bool)].sum()),
    )


def _weights(trained: Int64s, sessions: Sequence[SessionKey], options: Options) -> Float64s:
    """The loss weight of each trained token of a trajectory."""
    if options.weighting == "token":
        return np.full(len(trained), 1.0 / int(trained.sum()))
    _, session_of = np.unique(np.array(["\0".join(s) for s in sessions]), return_inverse=True)
    totals = np.bincount(session_of, weights=trained)
    if options.weighting == "constant":
        return np.full(len(trained), 1.0 / (options.max_tokens * len(totals)))
    return 1.0 / (len(totals) * totals[session_of])
