"""What people read before and after a rollout: what would be started, and what came out.

Invariant: it says only what is in the tasks, the options and the rows. It prints nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from rich.table import Table

from polar_toolkit.rollout.options import Options
from polar_toolkit.rollout.outcome import FILE, Outcome, Status
from polar_toolkit.rollout.recipe import Recipe
from polar_toolkit.rollout.task import Task

BROKEN = (Status.SETUP_FAILED, Status.EVALUATOR_FAILED)
"""Statuses that say that something of the user's is broken, not the harness's work."""
_ROWS = 20
_STAGES = ("init_s", "ready_s", "run_s", "post_s")


# --- before -------------------------------------------------------------------------------------------------------


def task_table(tasks: Sequence[Task], options: Options) -> Table:
    """Each task, how it is prepared and judged, and what it may use."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("task", "image", "prepare", "evaluator"):
        table.add_column(name, overflow="fold")
    for name in ("init s", "run s", "post s", "turns", "tokens"):
        table.add_column(name, justify="right")
    for task in tasks:
        budget = options.budget.over(task.budget)
        seconds = (f"{value:g}" for value in (budget.init_s, budget.run_s, budget.post_s))
        image = task.environment.image or str(task.environment.dockerfile or "-")
        steps = str(len(task.environment.prepare) or "-")
        limits = (str(budget.turns or "-"), str(budget.tokens or "-"))
        table.add_row(task.task_id, image, steps, task.check.kind, *seconds, *limits)
    return table


def plan_lines(tasks: Sequence[Task], options: Options, recipe: Recipe, sandbox: str) -> Iterator[str]:
    """What would be started, in sentences. `sandbox`: what its kind says of itself on this machine."""
    pools, way = options.pools, recipe.way(options.way)
    part, parts = options.shard
    shard = f" (shard {part} of {parts})" if parts > 1 else ""
    total = len(tasks) * options.samples
    yield f"{len(tasks)} tasks x {options.samples} samples = {total} attempts{shard}"
    yield f"harness: {recipe.name} {recipe.version}, {way.name}: it believes that it talks to {way.host}"
    yield f"engine: {options.engine}, sampling {options.sampling}"
    yield f"sandbox: {sandbox}"
    yield f"at once: {pools.init} prepared, {pools.ready} in front of the runs, {pools.run} run, {pools.post} judged"
    enough = f"; a group is done with {options.enough} rewards" if options.enough else ""
    yield f"tries: {options.tries} where the fault is not the harness's{enough}"
    yield f"rewards are written of: {', '.join(options.rewarded)}; the others are masked"


# --- after --------------------------------------------------------------------------------------------------------


def status_table(rows: Sequence[Outcome]) -> Table:
    """Each status: how many, their reward, calls, tokens and seconds in each stage, on average."""
    table = Table("status", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("attempts", "reward", "calls", "tokens", "init s", "ready s", "run s", "post s"):
        table.add_column(name, justify="right")
    for status in Status:
        some = [row for row in rows if row.status is status]
        if some:
            table.add_row(status, *_averages(some))
    if len({row.status for row in rows}) > 1:
        table.add_row("all", *_averages(rows), style="bold")
    return table


def group_table(rows: Sequence[Outcome]) -> Table:
    """The rewards of each group; of many groups, those whose rewards differ most."""
    groups: dict[str, list[Outcome]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(row)
    shown = sorted(groups, key=lambda name: -_spread(groups[name]))[:_ROWS]
    more = f" ({len(shown)} of {len(groups)}, those whose rewards differ most)" if len(groups) > len(shown) else ""
    table = Table(f"group{more}", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("reward", "from", "to", "trained"):
        table.add_column(name, justify="right")
    table.add_column("not completed")
    for name in (name for name in groups if name in shown):
        some = groups[name]
        rewards = [row.reward for row in some if row.reward is not None]
        numbers = (f"{x:.2f}" for x in (fmean(rewards), min(rewards), max(rewards))) if rewards else ("-",) * 3
        others = Counter(row.status for row in some if row.status is not Status.COMPLETED)
        trained = f"{sum(row.trained for row in some)} of {len(some)}"
        table.add_row(name, *numbers, trained, ", ".join(f"{n} {status}" for status, n in others.most_common()))
    return table


def last_lines(rows: Sequence[Outcome], options: Options) -> Iterator[str]:
    """Where things are and what comes next."""
    notes = Counter(row.note for row in rows if row.status in BROKEN)
    for note, count in notes.most_common(3):
        yield f"{count} x {note}"
    yield f"rows: {options.run / FILE}"
    if any(row.status is Status.CANCELLED and "--resume" in row.note for row in rows):
        yield f"next: polar-toolkit rollout --resume {options.run}"
    elif any(row.trained for row in rows):
        yield f"next: polar-toolkit merge {options.run}"
    else:
        yield f"no reward was given; look at the column `note` and at {options.run / 'rollout' / 'attempts'}"


def _averages(rows: Sequence[Outcome]) -> list[str]:
    rewards = [row.reward for row in rows if row.reward is not None]
    seconds = (fmean(getattr(row, name) for row in rows) for name in _STAGES)
    calls, tokens = sum(row.calls for row in rows), sum(row.sampled_tokens for row in rows)
    reward = f"{fmean(rewards):.2f}" if rewards else "-"
    return [f"{len(rows):,}", reward, f"{calls:,}", f"{tokens:,}", *(f"{value:.1f}" for value in seconds)]


def _spread(rows: Sequence[Outcome]) -> float:
    rewards = [row.reward for row in rows if row.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0
