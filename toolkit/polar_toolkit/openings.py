"""The prompts of a session and what was sampled behind each: which call a prompt continues, found by comparing tokens.

Invariant: what is found depends on the tokens and on the order of calls, never on the order of rows; every hit is
proved by comparing all tokens, an index only says where to look. Time is linear in the prompts that are asked for.
Parents that a row names are followed elsewhere (prompts.py).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from polar_toolkit.calls import Call, Int32s
from polar_toolkit.prompts import Prompts, Rope, begins_with, ending, path_ids

_TOKEN = 4
"""Bytes of a token id."""
_Rank = tuple[int, bool, bool, bool, int]
"""The larger, the better: shared tokens, the whole output, the same thread, a delivered answer, the earlier call."""


@dataclass(frozen=True, slots=True)
class Openings:
    """The openings of a session by length of prompt, ascending; looked up from the longest downward."""

    prompts: Prompts
    openings: Sequence[_Opening]
    lengths: npt.NDArray[np.int64]
    """Tokens of each prompt."""
    last: Int32s
    """Its last token."""
    before: Int32s
    """The token before that; the same one in a prompt of one token."""
    reach: Sequence[int]
    """The largest prompt + output of it and the ones before it."""

    @classmethod
    def of(cls, prompts: Prompts, groups: Iterable[Sequence[int]]) -> Openings:
        """An index of the calls in `groups`: those of one group have one prompt, and each an output."""
        ordered = sorted(groups, key=lambda group: prompts.calls[group[0]].prompt_len)
        openings = [_Opening.of(prompts.calls, group) for group in ordered]
        lengths = [prompts.calls[group[0]].prompt_len for group in ordered]
        ends = [np.frombuffer(ending(prompts, group[0]), np.int32) for group in ordered]
        tips = (length + opening.longest for length, opening in zip(lengths, openings, strict=True))
        last, before = ([int(end[max(-back, -len(end))]) for end in ends] for back in (1, 2))
        columns = np.array(lengths, np.int64), np.array(last, np.int32), np.array(before, np.int32)
        return cls(prompts, openings, *columns, list(accumulate(tips, max)))

    def parent_of(self, root: int) -> Rope | None:
        """The call with whose prompt + output a root's prompt shares most, at least one sampled token."""
        call = self.prompts.calls[root]
        ids = path_ids(self.prompts, root, call.prompt_len)
        best: tuple[_Rank, int] = (0, False, False, False, 0), -1
        end, step = int(np.searchsorted(self.lengths, len(ids))), 4
        while end > 0 and self.reach[end - 1] >= best[0][0]:
            start = max(0, end - step)
            for at in self._likely(ids, start, end):
                if self.reach[at] < best[0][0]:
                    break
                rank, index = self.openings[at].follow(ids, int(self.lengths[at]), call.thread_id)
                if index >= 0 and rank > best[0] and begins_with(ids, self.prompts, index):
                    best = rank, index
            end, step = start, step * 4  # the parent is mostly among the first few; otherwise many are far cheaper
        (shared, *_), parent = best
        return None if parent < 0 else Rope(parent, shared, ids[shared:])

    def _likely(self, ids: Int32s, start: int, end: int) -> list[int]:
        """Which of some openings may be the beginning of `ids`, by their last two tokens; the longest first."""
        lengths = self.lengths[start:end]
        fits = ids[lengths - 1] == self.last[start:end]
        fits &= ids[np.maximum(lengths - 2, 0)] == self.before[start:end]
        return (start + np.flatnonzero(fits)[::-1]).tolist()


@dataclass(frozen=True, slots=True)
class _Opening:
    """The outputs that were sampled behind one prompt."""

    calls: Sequence[Call]
    outputs: dict[bytes, list[int]]
    """Calls by output."""
    ordered: Sequence[bytes]
    """Outputs as sorted bytes: those that share most with a given one are its neighbours."""
    longest: int
    """Tokens of the longest output."""
    picks: dict[bytes, tuple[dict[str | None, int], int]] = field(default_factory=dict)
    """Of the outputs that begin so, the best call of each thread and the best of all."""

    @classmethod
    def of(cls, calls: Sequence[Call], indices: Sequence[int]) -> _Opening:
        outputs: dict[bytes, list[int]] = {}
        for index in indices:
            outputs.setdefault(calls[index].output_ids.tobytes(), []).append(index)
        return cls(calls, outputs, sorted(outputs), max(map(len, outputs)) // _TOKEN)

    def follow(self, ids: Int32s, length: int, thread: str | None) -> tuple[_Rank, int]:
        """The best of the calls whose outputs share most with `ids` behind its first `length` tokens; -1 when none."""
        data = ids[length : length + self.longest].tobytes()
        at = bisect_left(self.ordered, data)
        taken = max(_shared(output, data) for output in self.ordered[max(0, at - 1) : at + 1])
        if not taken:
            return (length, False, False, False, 0), -1
        start = data[: taken * _TOKEN]
        index = self._pick(start, thread)
        call = self.calls[index]
        return (length + taken, start in self.outputs, call.thread_id == thread, call.delivered, -index), index

    def _pick(self, start: bytes, thread: str | None) -> int:
        """The best call among the whole outputs equal to `start`, else among all that begin with it."""
        if start not in self.picks:
            same = self.outputs.get(start) or self._beginning_with(start)
            ranked = sorted(same, key=lambda index: (not self.calls[index].delivered, index))
            by_thread: dict[str | None, int] = {}
            for index in ranked:
                by_thread.setdefault(self.calls[index].thread_id, index)
            self.picks[start] = by_thread, ranked[0]
        by_thread, first = self.picks[start]
        return by_thread.get(thread, first)

    def _beginning_with(self, start: bytes) -> list[int]:
        low = bisect_left(self.ordered, start)
        high = bisect_right(self.ordered, start, key=lambda output: output[: len(start)])
        return [index for output in self.ordered[low:high] for index in self.outputs[output]]


def _shared(one: bytes, other: bytes) -> int:
    """Leading tokens that two byte strings of token ids have in common."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // _TOKEN
    first, second = np.frombuffer(one, np.int32, size // _TOKEN), np.frombuffer(other, np.int32, size // _TOKEN)
    return int(np.argmax(first != second))
