"""Draws training runs as one picture of small panels, several runs laid over each other.

Invariant: a picture is a pure function of the runs' metrics and names, and runs can be told apart without colour. It
draws with matplotlib's own figure, never by its global state, so that no display is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from polar_train.errors import BadInput
from polar_train.metrics import Record, read

FILE = "curves.png"
"""Name of the picture in the folder of the first run, unless told."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One figure over the steps."""

    title: str
    value: Callable[[Record], float]
    worst: Callable[[Record], float] | None = None
    """A second, dotted curve: the largest where `value` is a mean."""
    log: bool = False
    level: float | None = None
    """A thin line that is always in view: where nothing has changed, or zero."""


REWARD = Panel("reward: mean over the sessions of a batch", lambda one: _known(one.reward_mean))
"""Above the others, over the whole width."""

PANELS: tuple[Panel, ...] = (
    Panel("loss", lambda one: one.loss, level=0),
    Panel("ratio, mean", lambda one: one.ratio_mean, level=1),
    Panel("clipped share of the tokens", lambda one: one.clip_share, level=0),
    Panel("KL to the reference, nats a token", lambda one: one.kl_mean, level=0),
    Panel("entropy, nats a token", lambda one: one.entropy_mean),
    Panel("logprob gap train/engine; dotted: max", lambda one: one.gap_mean, lambda one: one.gap_max, log=True),
    Panel("lag in steps; dotted: max", lambda one: one.lag_mean, lambda one: one.lag_max, level=0),
    Panel("trained tokens a second", lambda one: one.tokens_per_second, level=0),
    Panel("dead groups, share of all", lambda one: one.dead_groups / one.groups if one.groups else math.nan, level=0),
)
"""Below the reward, three in a row."""

COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#56b4e9")
"""Of the runs, in turn: told apart by the colour-blind, and of different greys."""
DASHES = ("-", "--", "-.", (0, (8, 3)), (0, (6, 2, 1, 2, 1, 2)))
MARKERS = "os^Dvx"
FEW = 20
"""Steps up to which a curve is drawn as it is; of more it is pale, and the mean over a trailing tenth is strong."""
_ACROSS = 3
_MARKS = 12
"""Markers on a curve, about: more would hide it."""


def draw(outs: Sequence[Path], to: Path | None = None, *, force: bool = False) -> Path:
    """Draws the runs in these folders into one picture, and gives its path.

    The picture goes to `to` (.png, .svg or .pdf), or into the first folder. Raises BadInput when it exists and `force`
    is not given, when its ending is another, or when a folder holds no metrics; nothing is written then.
    """
    picture = to or outs[0] / FILE
    if picture.suffix not in (".png", ".svg", ".pdf"):
        raise BadInput(f"a picture cannot be called {picture.name!r}: give a name that ends in .png, .svg or .pdf")
    if picture.exists() and not force:
        raise BadInput(f"{str(picture)!r} exists and is not overwritten: give --force, or another name with --to")
    if not picture.parent.is_dir():
        raise BadInput(f"{str(picture.parent)!r} is not a folder: make it, or give another name with --to")
    runs = [read(out) for out in outs]
    figure(dict(zip(_names(outs), runs, strict=True))).savefig(picture, dpi=120)
    return picture


def figure(runs: dict[str, list[Record]]) -> Figure:
    """The picture of runs by their names: the reward above, the other panels in a grid below."""
    rows = math.ceil(len(PANELS) / _ACROSS)
    whole = Figure(figsize=(11, 3 + 2.3 * rows), layout="constrained")
    grid = whole.add_gridspec(rows + 1, _ACROSS, height_ratios=[1.3] + [1] * rows)
    reward = whole.add_subplot(grid[0, :])
    _fill(reward, REWARD, runs)
    if any(len(records) > FEW for records in runs.values()):
        reward.set_title("strong: trailing mean over a tenth of the run", loc="right", fontsize=9)
    for index, panel in enumerate(PANELS):
        axes = whole.add_subplot(grid[1 + index // _ACROSS, index % _ACROSS], sharex=reward)
        _fill(axes, panel, runs)
        if index >= len(PANELS) - _ACROSS:
            axes.set_xlabel("step")
    whole.legend(*reward.get_legend_handles_labels(), loc="outside upper left", ncols=4, frameon=False)
    return whole


def _names(outs: Sequence[Path]) -> list[str]:
    """The folders' own names where these differ, else their paths."""
    names = [out.resolve().name for out in outs]
    return names if len(set(names)) == len(names) else [str(out) for out in outs]


def _fill(axes: Axes, panel: Panel, runs: dict[str, list[Record]]) -> None:
    axes.set_title(panel.title, loc="left", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=8)
    if panel.level is not None:
        axes.axhline(panel.level, color="0.6", linewidth=0.8)
    curves = [_curve(axes, panel, number, name, records) for number, (name, records) in enumerate(runs.items())]
    if not any(curves):
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color="0.4")
    elif panel.log:
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", scilimits=(-3, 5), useOffset=False)


def _curve(axes: Axes, panel: Panel, number: int, name: str, records: list[Record]) -> bool:
    """Draws one run into a panel; False when there is nothing of it to be seen."""
    colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
    steps = [record.step for record in records]
    values = [_seen(panel.value(record), panel) for record in records]
    if len(values) > FEW:
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=0.8)
        values = _trailing(values, len(values) // 10)
    axes.plot(
        steps, values, color=colour, linestyle=dashes, label=name, linewidth=1.4,
        marker=MARKERS[number % len(MARKERS)], markersize=4, markevery=max(1, len(steps) // _MARKS),
    )  # fmt: skip
    if panel.worst:
        axes.plot(steps, [_seen(panel.worst(record), panel) for record in records], ":", color=colour, linewidth=1)
    return any(map(math.isfinite, values))


def _seen(value: float, panel: Panel) -> float:
    """The value, or nan where the axis has no place for it."""
    return value if value > 0 or not panel.log else math.nan


def _trailing(values: list[float], window: int) -> list[float]:
    """The mean of each value and those before it, `window` in all; unknown ones are left out."""
    spans = (
        [one for one in values[max(0, end - window) : end] if math.isfinite(one)] for end in range(1, len(values) + 1)
    )
    return [sum(span) / len(span) if span else math.nan for span in spans]


def _known(value: float | None) -> float:
    return math.nan if value is None else value
