"""How many weight versions ago each trained token was sampled, and what becomes of those from too long ago.

Invariant: a token within the bound keeps its weight to the bit; one beyond it is dropped, or weighs less by the factor
that was asked for, and is counted. Loss weights are not normalised anew: what was dropped is missing from the sum, so
that the tokens that stay count as they did. Pure numpy; it knows neither model nor engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from polar_train.data import Row
from polar_train.errors import BadInput

_STEP = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Lag:
    """What is asked about old tokens."""

    max: int | None = None
    """A token may have been sampled this many weight versions ago; None for any number."""
    beyond: float = 0.0
    """What the weight of an older token is multiplied by; 0 drops it."""


@dataclass(frozen=True, slots=True)
class LagFigures:
    """Over the trained tokens of a batch, before any of them is dropped; in weight versions."""

    mean: float
    max: int
    tokens_beyond: int
    """Tokens that were dropped, or weigh less."""


@dataclass(frozen=True, slots=True)
class Versions:
    """The weight versions of a training run, in order: the model it began with, then one for each step."""

    base: str = "default"
    """What the engines call the weights that the run began with."""

    def name(self, step: int) -> str:
        """What the weights are called after so many steps."""
        return f"step-{step:06d}" if step else self.base

    def step(self, name: str) -> int | None:
        """After how many steps weights are called so; None for a name that is not of this run."""
        if name == self.base:
            return 0
        found = _STEP.fullmatch(name)
        return int(found[1]) if found and int(found[1]) else None


def bound(rows: Sequence[Row], versions: Versions, now: int, lag: Lag) -> tuple[list[Row], LagFigures]:
    """The rows with what is too old dropped or weighing less; `now` is the number of steps made.

    Raises BadInput for a version that is not of this run or comes after `now`, and when nothing is left to train.
    """
    lags = [_lags(row, versions, now)[row.versions_T] for row in rows]
    trained = [lag_T[row.loss_mask_T] for row, lag_T in zip(rows, lags, strict=True)]
    every = np.concatenate(trained) if trained else np.empty(0, np.int64)
    if not len(every):
        return [*rows], LagFigures(0.0, 0, 0)
    oldest = int(every.max())
    if lag.max is None or oldest <= lag.max:
        return [*rows], LagFigures(float(every.mean()), oldest, 0)
    beyond = int((every > lag.max).sum())
    if beyond == len(every) and not lag.beyond:
        raise BadInput(
            f"all {beyond} trained tokens were sampled more than {lag.max} weight versions before "
            f"{versions.name(now)!r}, the oldest {oldest} before: raise [lag] max or beyond, or sample anew"
        )
    bounded = [_bounded(row, row.loss_mask_T & (lag_T > lag.max), lag) for row, lag_T in zip(rows, lags, strict=True)]
    return bounded, LagFigures(float(every.mean()), oldest, beyond)


def _lags(row: Row, versions: Versions, now: int) -> npt.NDArray[np.int64]:
    """For each of the row's version names, how many versions ago it was; 0 for names that no trained token bears."""
    lags = np.zeros(len(row.version_names), np.int64)
    for code in np.unique(row.versions_T[row.loss_mask_T]).tolist():
        name = row.version_names[code]
        step = versions.step(name)
        if step is None:
            raise BadInput(
                f"tokens of trajectory {row.trajectory_ids[0]!r} and after were sampled by weight version {name!r}, "
                f"which is neither {versions.base!r} nor 'step-NNNNNN' of this run: set [engines] version to the name "
                "that the engine gives the weights of `model`, or sample anew"
            )
        if step > now:
            raise BadInput(
                f"tokens of trajectory {row.trajectory_ids[0]!r} and after were sampled by weight version {name!r}, "
                f"and the model here is {versions.name(now)!r}: they are from another run, or a checkpoint was removed"
            )
        lags[code] = now - step
    return lags


def _bounded(row: Row, beyond_T: npt.NDArray[np.bool_], lag: Lag) -> Row:
    if not beyond_T.any():
        return row
    if lag.beyond:
        return replace(
            row, loss_weight_T=np.where(beyond_T, row.loss_weight_T * np.float32(lag.beyond), row.loss_weight_T)
        )
    kept_T = row.loss_mask_T & ~beyond_T
    return replace(row, loss_mask_T=kept_T, loss_weight_T=np.where(kept_T, row.loss_weight_T, np.float32(0)))
