"""Training rows against the truth of a scenario: what is kept, twice, out of its context, or should not be there.

Invariant: it shares no code with what it grades. A token is told by a 64-bit hash of itself and all tokens before it,
summed with random multipliers by position, so a token in another context is another token. Its log-probability must be
the one it was sampled with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.stage.scenarios import Scenario, Turn

_Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One training row; the arrays have one element a token."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Marks:
    """What training rows do to the sampled tokens of a scenario."""

    samples: int
    kept: int
    """Wanted tokens that are trained at least once."""
    twice: int
    """Trainings of a wanted token beyond its first."""
    wrong: int
    """Trained tokens that were not sampled behind the tokens they stand behind, or not with that log-probability."""
    orphans: int
    """Trained tokens of answers that the session did not go on with."""

    def full(self, scenario: Scenario) -> bool:
        """Whether nothing is lost, doubled, misplaced or superfluous, in as few rows as can be."""
        return self == Marks(scenario.samples, scenario.wanted, 0, 0, 0)


def grade(scenario: Scenario, rows: Sequence[Row]) -> Marks:
    """Judge the rows that a merger made of the scenario."""
    longest = max(len(turn.prompt) + len(turn.output) for turn in scenario.turns)
    weights = _weights(max([longest, *(len(row.ids) for row in rows)]))
    wanted = _sampled([turn for turn in scenario.turns if turn.wanted], weights)
    orphaned = _sampled([turn for turn in scenario.turns if not turn.wanted], weights)
    trained = _joined(_hashes(row.ids, row.logprobs, weights)[row.mask] for row in rows)
    found, times = np.unique(trained[np.isin(trained, wanted)], return_counts=True)
    orphans = int(np.isin(trained, orphaned).sum())
    kept, used = len(found), int(times.sum())
    return Marks(len(rows), kept, used - kept, len(trained) - used - orphans, orphans)


def _sampled(turns: Sequence[Turn], weights: _Hashes) -> _Hashes:
    """The hashes of all sampled tokens of some turns."""
    return _joined(_of_turn(turn, weights) for turn in turns)


def _of_turn(turn: Turn, weights: _Hashes) -> _Hashes:
    ids = np.concatenate([turn.prompt, turn.output])
    logprobs = np.concatenate([np.zeros(len(turn.prompt), np.float32), turn.logprobs])
    return _hashes(ids, logprobs, weights)[len(turn.prompt) :]


def _joined(parts: Iterator[_Hashes]) -> _Hashes:
    return np.concatenate([np.empty(0, np.uint64), *parts])


def _hashes(ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32], weights: _Hashes) -> _Hashes:
    """uint64 [T]: of each token with all before it and its own log-probability; sums wrap around."""
    context = np.cumsum((ids.astype(np.uint64) + np.uint64(1)) * weights[: len(ids)], dtype=np.uint64)
    own = logprobs.astype(np.float32).view(np.uint32).astype(np.uint64)
    return context ^ (own * np.uint64(0x9E3779B97F4A7C15))


def _weights(length: int) -> _Hashes:
    return np.random.default_rng(7).integers(0, 2**64, length, dtype=np.uint64) | np.uint64(1)
