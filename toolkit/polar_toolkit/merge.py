"""From runs on disk to a merged folder: trajectories always, a batch where rewards exist.

Invariant: everything is read and checked before the earlier merged folder is replaced. It holds one run's calls in
memory at a time; people are told by the caller (cli.py), through `progress` and the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from polar_toolkit import batches, calls, merged, rewards, trajectories
from polar_toolkit.calls import SessionKey
from polar_toolkit.errors import Refusal
from polar_toolkit.stats import Ledger, Report, batch_report
from polar_toolkit.tree import Forest, Policy, grow

Progress = Callable[[str, int, int], None]
"""Called with (run name, sessions done, sessions in the run)."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is trained, and how it is packed."""

    policy: Policy = field(default_factory=Policy)
    batch: batches.Options = field(default_factory=batches.Options)


def merge(root: Path, out: Path, options: Options, progress: Progress) -> Report:
    """Write the merged folder of all runs under `root` to `out`. Raises Refusal with nothing overwritten."""
    runs = calls.find_runs(root)
    ledger, scores = Ledger(), read_rewards(runs)
    with merged.replacing(out) as fresh:
        with merged.write_trajectories(fresh) as writer:
            for forest in forests(runs, options.policy, progress):
                built = trajectories.build(forest)
                ledger.add(forest, built)
                if built:
                    writer.write_table(trajectories.to_table(built, scores))
        return _finish(fresh, ledger.report(runs), scores, options.batch)


def rebatch(root: Path, out: Path, options: batches.Options) -> Report:
    """Make the batch again from the trajectories in `out` and the rewards that the runs have now."""
    runs = calls.find_runs(root)
    table, report, scores = merged.read_trajectories(out), merged.read_report(out), read_rewards(runs)
    with merged.replacing(out) as fresh:
        with merged.write_trajectories(fresh) as writer:
            writer.write_table(trajectories.with_rewards(table, scores))
        return _finish(fresh, report, scores, options)


def account(root: Path, policy: Policy, progress: Progress) -> Report:
    """The report of a merge, without writing anything."""
    runs = calls.find_runs(root)
    ledger = Ledger()
    for forest in forests(runs, policy, progress):
        ledger.add(forest, trajectories.build(forest))
    return ledger.report(runs)


def forests(runs: list[Path], policy: Policy, progress: Progress) -> Iterator[Forest]:
    """The forest of every session of every run. Raises Refusal when there is none, or for two runs of one id."""
    seen: dict[str, Path] = {}
    for run in runs:
        sessions = calls.by_session(calls.read(run))
        for run_id in {key[0] for key in sessions}:
            if seen.setdefault(run_id, run) != run:
                raise Refusal(f"{run} and {seen[run_id]} are one run ({run_id!r}): one is a copy; move it away")
        progress(run.name, 0, len(sessions))
        for done, session in enumerate(sessions.values(), start=1):
            yield grow(session, policy)
            progress(run.name, done, len(sessions))
    if not seen:
        raise Refusal(f"{runs[0]} has no calls yet; run a harness through its interceptor, then merge again")


def read_rewards(runs: list[Path]) -> dict[SessionKey, float]:
    """The reward of every scored session of the runs."""
    scores: dict[SessionKey, float] = {}
    for run in runs:
        own = rewards.read(run)
        run_id = _run_id(run) if own else ""
        scores |= {(run_id, session): reward for session, reward in own.items()}
    return scores


def _run_id(run: Path) -> str:
    """The id in run.json, else the one that the calls carry."""
    return calls.run_info(run).get("run_id") or next((call.run_id for call in calls.read(run)), "")


def _finish(fresh: Path, report: Report, scores: dict[SessionKey, float], options: batches.Options) -> Report:
    """Add the batch and the report to a folder that has its trajectories."""
    batch = batches.build(merged.read_trajectories(fresh), options)
    report["batch"] = batch_report(batch, scores) if scores else None
    if len(batch.table):
        merged.write_batches(fresh, batch.table)
    merged.write_report(fresh, report)
    return report
