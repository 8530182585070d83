"""From runs on disk to a merged folder: trajectories always, batches where rewards exist.

Invariant: everything is read and checked before the earlier merged folder is replaced. In memory are the shards that
are worked on (shards.py), one a worker; the result does not depend on how many workers there are. People are told by
the caller (cli.py), through `progress` and the report.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from polar_toolkit import batches, calls, card, merged, packed, rewards, trajectories
from polar_toolkit.calls import SessionKey
from polar_toolkit.errors import Refusal
from polar_toolkit.ledger import Ledger, Report, batch_report
from polar_toolkit.locations import is_of_this_process
from polar_toolkit.parallel import cpus, in_order
from polar_toolkit.shards import Shard, plan
from polar_toolkit.trajectories import Trajectory
from polar_toolkit.tree import Policy, grow

Progress = Callable[[str, int, int], None]
"""Called with (run name, sessions done, sessions in the run)."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is trained, how it is packed, and by how many processes."""

    policy: Policy = field(default_factory=Policy)
    """Its `versions` are found by the merge."""
    batch: batches.Options = field(default_factory=batches.Options)
    workers: int | None = None
    """Processes at a time; as many as this one has CPUs unless given."""


def merge(root: Path, out: Path, options: Options, progress: Progress) -> Report:
    """Write the merged folder of all runs under `root` to `out`. Raises Refusal with nothing overwritten."""
    runs = calls.find_runs(root)
    scores = read_rewards(runs)
    with merged.replacing(out) as fresh:
        ledger = _merge_shards(runs, options, progress, _Output(fresh, scores))
        merged.write_sessions(fresh, ledger.sessions())
        report = ledger.report(runs)
        policy = options.policy
        report["options"] = {
            "kinds": [*policy.kinds],
            "delivered_only": policy.delivered_only,
            "max_lag": policy.max_lag,
        }
        return _finish(fresh, report, _Scored(scores, _tokenizers(runs)), options.batch)


def rebatch(root: Path, out: Path, options: batches.Options) -> Report:
    """Make the batches again from the trajectories in `out` and the rewards that the runs have now."""
    runs = calls.find_runs(root)
    pieces, report, scores = merged.trajectory_pieces(out), merged.read_report(out), read_rewards(runs)
    sessions = merged.read_sessions(out)
    with merged.replacing(out) as fresh:
        merged.write_sessions(fresh, sessions)
        jobs = _rewarded(pieces, fresh, scores)
        for _ in in_order(_write_rewarded, jobs, _workers([out, fresh], None)):
            pass  # the parts are all that is made
        return _finish(fresh, report, _Scored(scores, _tokenizers(runs)), options)


def account(root: Path, options: Options, progress: Progress) -> tuple[Ledger, Report]:
    """The ledger and the report of a merge, without its files."""
    runs = calls.find_runs(root)
    ledger = _merge_shards(runs, options, progress, None)
    return ledger, ledger.report(runs)


def read_rewards(runs: Sequence[Path]) -> dict[SessionKey, float]:
    """The reward of every scored session of the runs."""
    scores: dict[SessionKey, float] = {}
    for run in runs:
        own = rewards.read(run)
        run_id = _run_id(run) if own else ""
        scores |= {(run_id, session): reward for session, reward in own.items()}
    return scores


def _run_id(run: Path) -> str:
    """The id in run.json, else the one that the calls carry."""
    named = calls.run_info(run).get("run_id")
    return named or next((run_id for run_id in calls.table(run, ["run_id"])["run_id"].to_pylist() if run_id), "")


@dataclass(frozen=True, slots=True)
class _Output:
    folder: Path
    scores: Mapping[SessionKey, float]


@dataclass(frozen=True, slots=True)
class _Job:
    """A shard and what is to be done with it, as it travels to a worker."""

    shard: Shard
    policy: Policy
    part: Path | None
    """Where its trajectories go; None to account for them only."""
    scores: Mapping[SessionKey, float]


def _merge_shards(runs: Sequence[Path], options: Options, progress: Progress, output: _Output | None) -> Ledger:
    ledger = Ledger()
    with tempfile.TemporaryDirectory(prefix="polar-merge-") as scratch:
        cut = plan(runs, Path(scratch))
        policy = replace(options.policy, versions=cut.versions)
        jobs = [_job(number, shard, policy, output) for number, shard in enumerate(cut.shards)]
        workers = _workers([*runs, *([output.folder] if output else [])], options.workers)
        done: dict[str, int] = {}
        for shard, part in zip(cut.shards, in_order(_merge_shard, jobs, workers), strict=True):
            total = cut.sessions_of(shard.run)
            if shard.run not in done:
                progress(shard.run, 0, total)
            done[shard.run] = done.get(shard.run, 0) + len(shard.sessions)
            ledger.absorb(part)
            progress(shard.run, done[shard.run], total)
    return ledger


def _workers(places: Sequence[Path], wanted: int | None) -> int:
    return 1 if any(map(is_of_this_process, places)) else wanted or cpus()


def _job(number: int, shard: Shard, policy: Policy, output: _Output | None) -> _Job:
    if output is None:
        return _Job(shard, policy, None, {})
    scores = {session: output.scores[session] for session in shard.sessions if session in output.scores}
    return _Job(shard, policy, merged.trajectory_part(output.folder, number), scores)


def _merge_shard(job: _Job) -> Ledger:
    """Merge the sessions of a shard and write its part; the ledger of them."""
    ledger = Ledger()
    groups = _groups(job, ledger)
    if job.part is None:
        for _ in groups:
            pass  # the ledger is all that is asked for
        return ledger
    with merged.Rows(job.part) as part:
        for group in groups:
            part.write(trajectories.to_table(group, job.scores))
    return ledger


def _groups(job: _Job, ledger: Ledger) -> Iterator[list[Trajectory]]:
    """The trajectories of a shard, as many as one row group takes at a time; each session enters the ledger."""
    group: list[Trajectory] = []
    for session in job.shard.read().values():
        forest = grow(session, job.policy)
        built = trajectories.build(forest)
        ledger.add(forest, built)
        group += built
        if sum(len(one.input_ids) for one in group) >= merged.GROUP_TOKENS:
            yield group
            group = []
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _Rewarding:
    """A part that is written again with other rewards."""

    pieces: tuple[merged.Piece, ...]
    part: Path
    scores: Mapping[SessionKey, float]


def _rewarded(pieces: Sequence[merged.Piece], fresh: Path, scores: Mapping[SessionKey, float]) -> list[_Rewarding]:
    paths = dict.fromkeys(piece.path for piece in pieces)
    return [
        _Rewarding(tuple(p for p in pieces if p.path == path), merged.trajectory_part(fresh, number), scores)
        for number, path in enumerate(paths)
    ]


def _write_rewarded(job: _Rewarding) -> None:
    with merged.Rows(job.part) as part:
        for piece in job.pieces:
            part.write(trajectories.with_rewards(piece.read(trajectories.SCHEMA.names), job.scores))


@dataclass(frozen=True, slots=True)
class _Scored:
    """What batches are made of beside the trajectories."""

    scores: Mapping[SessionKey, float]
    tokenizers: Mapping[str, str]
    """Fingerprint by run id, of the runs that recorded it."""


def _tokenizers(runs: Sequence[Path]) -> dict[str, str]:
    said = {run: calls.run_info(run).get("tokenizer_fingerprint") for run in runs}
    return {_run_id(run): tokenizer for run, tokenizer in said.items() if tokenizer}


def _finish(fresh: Path, report: Report, scored: _Scored, options: batches.Options) -> Report:
    """Add the batches, the report and the card to a folder that has its trajectories."""
    report["batch"] = _batches(fresh, scored, options) if scored.scores else None
    merged.write_report(fresh, report)
    merged.write_card(fresh, card.text(report))
    return report


def _batches(fresh: Path, scored: _Scored, options: batches.Options) -> Report:
    seen = batches.survey(merged.trajectory_pieces(fresh), options.max_tokens)
    planned = batches.plan(seen, options)
    written: list[packed.Written] = []
    for number, batch in enumerate(planned.batches):
        path, said = merged.batch_file(fresh, number), packed.metadata(batch, _tokenizer(batch, scored))
        rows = _write_batch(path, packed.tables(seen, batch, options.max_tokens), said)
        tokens = int(seen.length_N[batch.members].sum())
        written.append(packed.Written(path.relative_to(fresh).as_posix(), rows, tokens))
    return batch_report(planned, written, scored.scores) | {"options": asdict(options)}


def _tokenizer(batch: batches.Batch, scored: _Scored) -> str | None:
    """The one that all runs of a batch recorded. Raises Refusal when there are two: their ids mean different things."""
    runs = {run for group in batch.groups for run, _ in group.sessions}
    found = {scored.tokenizers[run]: run for run in sorted(runs) if run in scored.tokenizers}
    if len(found) > 1:
        told = ", ".join(f"{tokenizer} (run {run})" for tokenizer, run in found.items())
        raise Refusal(f"a batch would mix the token ids of several tokenizers: {told}; merge the runs of each apart")
    return next(iter(found), None)


def _write_batch(path: Path, tables: Iterable[pa.Table], said: Mapping[str, str]) -> int:
    """The number of rows written."""
    rows = 0
    with merged.Rows(path, said) as file:
        for table in tables:
            file.write(table)
            rows += len(table)
    return rows
