"""The one form of training data: a forest of tokens in depth-first order. Layouts differ only in how much they merge.

Invariant: every root-to-leaf path spells a trajectory, and every token that bears loss stands in the forest once,
behind the very tokens before it. Tokens with the same tokens before them are one node whatever session they are from,
unless both bear loss: two samples stay two. Pure numpy; it knows neither model nor loss.

| layout | what is merged | tokens computed |
|---|---|---|
| per_request | nothing: each sampled span with the whole prompt before it | most |
| packed | the spans of one trajectory | fewer |
| tree | every shared beginning of the trajectories of a row, of whatever session and group | fewest |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from polar_train.data import Float_T, Int_T, Mask_T, Row

Index_T = npt.NDArray[np.int64]


class Layout(StrEnum):
    """How much of a batch is merged."""

    PER_REQUEST = "per_request"
    PACKED = "packed"
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class Forest:
    """T tokens in depth-first order: the descendants of token t are the tokens t + 1 ... end[t] - 1."""

    input_ids_T: Int_T
    parent_T: Int_T
    """Index of the token before; -1 at a root."""
    position_T: Int_T
    """Depth: 0 at a root."""
    end_T: Int_T
    """Index behind the last descendant."""
    loss_mask_T: Mask_T
    old_logprobs_T: Float_T
    advantages_T: Float_T
    temperature_T: Float_T
    loss_weight_T: Float_T

    def __len__(self) -> int:
        return len(self.input_ids_T)

    def nodes(self, longest: int) -> list[Node]:
        """Runs of tokens without a branch, none longer than `longest`, in depth-first order."""
        starts = self._starts()
        cut = [slice_ for a, b in zip(starts, [*starts[1:], len(self)], strict=True) for slice_ in _cut(a, b, longest)]
        return [Node(a, b, int(self.end_T[a])) for a, b in cut]

    def _starts(self) -> list[int]:
        here = np.arange(len(self))
        children = np.bincount(self.parent_T[self.parent_T >= 0], minlength=len(self))
        goes_on = (self.parent_T == here - 1) & (here > 0)
        alone = np.concatenate([[False], children[:-1] == 1])
        return np.flatnonzero(~(goes_on & alone)).tolist()


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens a ... b - 1, each the only child of the one before; the descendants of the last end before `end`."""

    a: int
    b: int
    end: int


_FIELDS = ("input_ids_T", "loss_mask_T", "old_logprobs_T", "advantages_T", "temperature_T", "loss_weight_T")


def lay_out(rows: Iterable[Row], layout: Layout, max_tokens: int) -> Iterator[Forest]:
    """Forests of at most `max_tokens` tokens (or of one longer trajectory) that hold the trained tokens of all rows.

    A beginning that trajectories of two forests share stands, whole, in both.
    """
    chains = [chain for row in rows for chain in trajectories(row) if chain.trained]
    if layout is Layout.PER_REQUEST:
        chains = [request for chain in chains for request in requests(chain)]
    if layout is Layout.TREE:
        chains.sort(key=lambda chain: chain.input_ids_T.astype(">i4").tobytes())
    window: list[_Segment] = []
    tokens = 0
    for chain in chains:
        segment = _attach(chain, window, merges=layout is Layout.TREE)
        if window and tokens + segment.new > max_tokens:
            yield _forest(window)
            window, tokens = [], 0
            segment = _attach(chain, window, merges=False)
        window.append(segment)
        tokens += segment.new
    if window:
        yield _forest(window)


def trajectories(row: Row) -> Iterator[Row]:
    """Each trajectory of a packed row as a row of its own, without copying."""
    ends = np.cumsum(row.lengths)
    for index, end in enumerate(ends):
        part = slice(int(end - row.lengths[index]), int(end))
        yield replace(
            _part(row, part),
            lengths=row.lengths[index : index + 1],
            trajectory_ids=row.trajectory_ids[index : index + 1],
            session_ids=row.session_ids[index : index + 1],
            group_ids=row.group_ids[index : index + 1],
        )


def requests(chain: Row) -> Iterator[Row]:
    """Each sampled span of a trajectory, with all that came before it, as a row of its own."""
    edges = np.flatnonzero(np.diff(chain.loss_mask_T.astype(np.int8), prepend=0, append=0))
    for start, end in edges.reshape(-1, 2):
        part = _part(chain, slice(0, int(end)))
        alone = np.zeros(end, np.bool_)
        alone[start:] = True
        weights = np.where(alone, part.loss_weight_T, np.float32(0))
        yield replace(part, loss_mask_T=alone, loss_weight_T=weights, lengths=np.array([end], np.int32))


def _part(row: Row, part: slice) -> Row:
    return replace(row, **{name: getattr(row, name)[part] for name in (*_FIELDS, "position_ids_T", "versions_T")})


def _cut(a: int, b: int, longest: int) -> Iterator[tuple[int, int]]:
    """The first piece is the short one: of a path's last node, the longest, nothing is computed twice."""
    first = (b - a) % longest
    if first:
        yield a, a + first
    for start in range(a + first, b, longest):
        yield start, start + longest


# --- growing ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Segment:
    """What a trajectory adds to the forest: its tokens from `start` on, below another segment's."""

    chain: Row
    start: int
    host: int
    """Index of the segment that holds the token before `start`; -1 for a root."""
    path: Index_T
    """For each of its tokens so far, the (segment, place) that holds it, as one number."""
    loss: Mask_T
    """Which tokens of its path bear loss."""

    @property
    def new(self) -> int:
        return len(self.chain.input_ids_T) - self.start


def _attach(chain: Row, window: Sequence[_Segment], *, merges: bool) -> _Segment:
    """Where a trajectory leaves the path of the one before it in the order of their tokens: no other shares more."""
    length, here = len(chain.input_ids_T), len(window)
    own = (np.int64(here) << 32) + np.arange(length)
    if not window or not merges:
        return _Segment(chain, 0, -1, own, chain.loss_mask_T)
    before = window[-1]
    start = _shared(chain, before)
    path = np.concatenate([before.path[:start], own[start:]])
    loss = np.concatenate([before.loss[:start] | chain.loss_mask_T[:start], chain.loss_mask_T[start:]])
    host = int(path[start - 1] >> 32) if start else -1
    return _Segment(chain, start, host, path, loss)


def _shared(chain: Row, before: _Segment) -> int:
    """The number of leading tokens that are equal, and of which no one bears loss in both."""
    count = min(len(chain.input_ids_T), len(before.path))
    differs = chain.input_ids_T[:count] != before.chain.input_ids_T[:count]
    differs |= chain.loss_mask_T[:count] & before.loss[:count]
    return int(differs.argmax()) if differs.any() else count


def _forest(segments: Sequence[_Segment]) -> Forest:
    take, parent, end = _depth_first(segments)
    offsets = np.cumsum([0, *(len(segment.chain.input_ids_T) for segment in segments)])
    source = _sources(segments, offsets)
    columns = {
        name: np.concatenate([getattr(segment.chain, name) for segment in segments])[source[offsets[take[0]] + take[1]]]
        for name in _FIELDS
    }
    return Forest(parent_T=parent, position_T=take[1].astype(np.int32), end_T=end, **columns)


def _sources(segments: Sequence[_Segment], offsets: Index_T) -> Index_T:
    """For each token of each trajectory, the place in all of them from which its figures come: where it bears loss."""
    source = np.arange(int(offsets[-1]))
    for index, segment in enumerate(segments):
        at = np.flatnonzero(segment.chain.loss_mask_T[: segment.start])
        held = segment.path[at]
        source[offsets[held >> 32] + (held & 0xFFFFFFFF)] = offsets[index] + at
    return source


def _depth_first(segments: Sequence[_Segment]) -> tuple[tuple[Index_T, Index_T], Int_T, Int_T]:
    """(segment, depth) of each token in order, the parent's index, and the index behind the last descendant.

    A segment's own continuation comes behind what branches off it, so that its tokens all end where it ends.
    """
    below: list[list[int]] = [[] for _ in segments]
    for index, segment in enumerate(segments):
        if segment.host >= 0:
            below[segment.host].append(index)
    for branches in below:
        branches.sort(key=lambda index: segments[index].start, reverse=True)
    order = _Order()
    for index, segment in enumerate(segments):
        if segment.host < 0:
            _walk(index, segments, below, order)
    return order.done()


def _walk(root: int, segments: Sequence[_Segment], below: list[list[int]], order: _Order) -> None:
    stack = [_Visit(root, segments[root].start, -1)]
    while stack:
        visit = stack[-1]
        branches, length = below[visit.segment], len(segments[visit.segment].chain.input_ids_T)
        until = segments[branches[-1]].start if branches else length
        order.emit(visit, until)
        if branches:
            stack.append(_Visit(branches.pop(), until, visit.last))
        else:
            order.close(visit)
            stack.pop()


@dataclass(slots=True)
class _Visit:
    segment: int
    depth: int
    """Of the next token."""
    last: int
    """Index of the token before it; -1 for none."""
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


class _Order:
    """The tokens as they come."""

    def __init__(self) -> None:
        self._segment: list[Index_T] = []
        self._depth: list[Index_T] = []
        self._parent: list[Index_T] = []
        self._ends: list[tuple[int, int, int]] = []
        self._count = 0

    def emit(self, visit: _Visit, until: int) -> None:
        """The tokens of a segment up to a depth."""
        count = until - visit.depth
        if not count:
            return
        here = np.arange(self._count, self._count + count)
        self._segment.append(np.full(count, visit.segment))
        self._depth.append(np.arange(visit.depth, until))
        self._parent.append(np.concatenate([[visit.last], here[:-1]]))
        visit.spans.append((self._count, self._count + count))
        self._count += count
        visit.depth, visit.last = until, self._count - 1

    def close(self, visit: _Visit) -> None:
        """Nothing comes below a segment any more."""
        self._ends += [(a, b, self._count) for a, b in visit.spans]

    def done(self) -> tuple[tuple[Index_T, Index_T], Int_T, Int_T]:
        """See `_depth_first`."""
        end = np.zeros(self._count, np.int32)
        for a, b, value in self._ends:
            end[a:b] = value
        taken = np.concatenate(self._segment), np.concatenate(self._depth)
        return taken, np.concatenate(self._parent).astype(np.int32), end
