"""What several runs of learn.py came to: a table, two small Parquet files and a picture.

    python examples/learn/report.py runs/learn-1 runs/learn-2 runs/learn-1-shuffled --out examples/learn/results

held_out.parquet has a row for each held-out question and time it was asked, steps.parquet one for each GRPO step. What
the folder has of other runs stays in it and is shown, too; a run of the same name takes the place of the earlier one.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import polars as pl
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from polar_train import metrics

ASKED = ("before", "after", "before-greedy", "after-greedy")
COLUMNS = ("task_id", "status", "reward", "calls", "sampled_tokens")


def main() -> None:
    """Read the runs, write the results, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    held = added(a.out / "held_out.parquet", [held_out(run) for run in a.runs])
    steps = added(a.out / "steps.parquet", [learned(run) for run in a.runs])
    draw(steps, held).savefig(a.out / "curves.png", dpi=120)
    show(held, steps)


def added(file: Path, runs: list[pl.DataFrame]) -> pl.DataFrame:
    """What a file holds, with these runs in it, in the order of their names."""
    fresh = pl.concat(runs, how="diagonal_relaxed")
    kept = [pl.read_parquet(file).join(fresh, on="run", how="anti")] if file.is_file() else []
    whole = pl.concat([*kept, fresh], how="diagonal_relaxed").sort("run", maintain_order=True)
    whole.write_parquet(file)
    return whole


def learned(run: Path) -> pl.DataFrame:
    """The figures of a run's GRPO steps."""
    return pl.DataFrame([asdict(r) for r in metrics.read(run / "loop")]).with_columns(run=pl.lit(run.name))


def held_out(run: Path) -> pl.DataFrame:
    """All answers to held-out questions of a run, through the interceptor and, where it was asked, without."""
    told = json.loads((run / "run.json").read_text())
    frames = []
    for asked in ASKED:
        if not (run / asked / "rollouts.parquet").is_file():
            continue
        rows = pl.read_parquet(run / asked / "rollouts.parquet")
        frames.append(rows.select([c for c in COLUMNS if c in rows.columns]).with_columns(asked=pl.lit(asked)))
    if (run / "plain.jsonl").is_file():
        frames.append(pl.read_ndjson(run / "plain.jsonl").with_columns(asked=pl.lit("after-plain-chat")))
    whole = pl.concat(frames, how="diagonal")
    return whole.with_columns(run=pl.lit(run.name), seed=pl.lit(told["seed"]), shuffled=pl.lit(told["shuffled"]))


def paired(held: pl.DataFrame, run: str, first: str, second: str) -> tuple[float, float, float]:
    """The mean of (second - first) over questions, and its 95 % interval by 10,000 draws of the questions."""
    of = held.filter(pl.col("run") == run)
    both = of.filter(pl.col("asked") == first).join(of.filter(pl.col("asked") == second), on="task_id", suffix="_2")
    change = (both["reward_2"].fill_null(0) - both["reward"].fill_null(0)).to_numpy()
    drawn = np.random.default_rng(0).choice(change, (10_000, len(change))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(change.mean()), float(low), float(high)


def show(held: pl.DataFrame, steps: pl.DataFrame) -> None:
    """The table of all runs."""
    table = Table()
    for name in ("run", "asked", "questions", "before", "after", "change", "95 % interval", "right without a call"):
        table.add_column(name, no_wrap=True)
    for run in held["run"].unique(maintain_order=True):
        for first, second in (("before", "after"), ("before-greedy", "after-greedy")):
            of = held.filter(pl.col("run") == run)
            if of.filter(pl.col("asked") == second).is_empty():
                continue
            means = [of.filter(pl.col("asked") == asked)["reward"].fill_null(0).mean() for asked in (first, second)]
            right = of.filter(pl.col("asked").is_in([first, second]) & (pl.col("reward") > 0))
            change, low, high = paired(held, run, first, second)
            table.add_row(
                run, second.replace("after", "sampled") if second == "after" else "greedy",
                str(of.filter(pl.col("asked") == first).height), f"{means[0]:.3f}", f"{means[1]:.3f}",
                f"{change:+.3f}", f"{low:+.3f} to {high:+.3f}", str(right.filter(pl.col("calls") < 2).height),
            )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    plain = held.filter(pl.col("asked") == "after-plain-chat")
    for (run,), rows in plain.group_by(["run"], maintain_order=True):
        print(f"{run}: {rows['reward'].mean():.3f} through a plain chat endpoint, {rows.height} questions")
    for (run,), rows in steps.group_by(["run"], maintain_order=True):
        print(f"{run}: {rows.height} GRPO steps in {(rows['at'].max() - rows['at'].min()) / 60:.0f} min")


def draw(steps: pl.DataFrame, held: pl.DataFrame) -> Figure:
    """The mean reward of each step's attempts, and what the held-out questions scored before and after."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, ((run,), rows) in enumerate(steps.group_by(["run"], maintain_order=True)):
        colour, last = f"C{number}", int(rows["step"].max())
        axes.plot(rows["step"], rows["reward_mean"], color=colour, marker="os^Dv"[number % 5], label=run)
        of = held.filter(pl.col("run") == run)
        scored = [of.filter(pl.col("asked") == asked)["reward"].fill_null(0).mean() for asked in ("before", "after")]
        axes.plot([0, last + 1], scored, color=colour, linestyle="none", marker="*", markersize=14)
    axes.set(xlabel="GRPO step", ylabel="share of questions answered", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, title="in training, and as a star held out")
    return figure


if __name__ == "__main__":
    main()
