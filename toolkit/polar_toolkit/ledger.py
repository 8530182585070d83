"""The accounting: where every sampled token of a set of runs went, counted from forests and trajectories.

Invariant: sampled = trained + the sum over all reasons, for each session and altogether; how often a token is trained
is counted on the loss masks themselves, not taken over from what assigned the owners. It keeps no token arrays.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from polar_toolkit import calls
from polar_toolkit.batches import Plan
from polar_toolkit.calls import SessionKey
from polar_toolkit.packed import Written
from polar_toolkit.trajectories import Trajectory
from polar_toolkit.tree import Forest, Node

Report = dict[str, Any]  # Any: JSON values, the contents of report.json
Counts = Counter[tuple[str, str]]
"""Figures by (what is counted, its name)."""
REPORT_VERSION = 2
DRIFT_BINS = (16, 128, 1024, 8192)
"""Upper ends, in tokens of the parent's path that a re-render loses."""

_SESSIONS = pa.schema(
    [
        pa.field("run_id", pa.string()),
        pa.field("session_id", pa.string()),
        pa.field("group_id", pa.string()),
        pa.field("calls", pa.int64()),
        pa.field("sampled", pa.int64()),
        pa.field("trained", pa.int64()),
        pa.field("not_trained", pa.map_(pa.string(), pa.int64())),
        pa.field("trajectories", pa.int64()),
        pa.field("trajectory_tokens", pa.int64()),
        pa.field("two_owners", pa.int64()),
        pa.field("versions", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True, slots=True)
class Account:
    """What became of one session."""

    session: SessionKey
    group_id: str | None
    counts: Counts

    def of(self, section: str) -> dict[str, int]:
        """The figures of a section, by name."""
        return _section(self.counts, section)


@dataclass(slots=True)
class Ledger:
    """Adds up sessions, one at a time."""

    accounts: list[Account] = field(default_factory=list[Account])

    def add(self, forest: Forest, built: Sequence[Trajectory]) -> None:
        """Account for one session."""
        counts: Counts = Counter()
        for node in forest.nodes:
            _count_call(counts, node)
        _count_rerenders(counts, forest)
        _count_trained(counts, forest, built)
        self.accounts.append(Account(forest.session, forest.group_id, counts))

    def absorb(self, other: Ledger) -> None:
        """Add what another ledger holds, after what this one does."""
        self.accounts += other.accounts

    def sessions(self) -> pa.Table:
        """One row a session, in the order in which they were added."""
        rows = [_session_row(account) for account in self.accounts]
        return pa.Table.from_pylist(rows, schema=_SESSIONS)

    def report(self, runs: Sequence[Path]) -> Report:
        """The accounting of everything added, as JSON values. `runs` are the folders it came from."""
        total: Counts = Counter()
        for account in self.accounts:
            total.update(account.counts)
        return {
            "report_version": REPORT_VERSION,
            "runs": [run.name for run in runs],
            "sessions": len(self.accounts),
            "calls": {
                "total": sum(_section(total, "status").values()),
                "by_status": _section(total, "status"),
                "by_kind": _section(total, "kind"),
            },
            "tokens": _tokens(total),
            "calls_not_trained": _section(total, "calls_not_trained"),
            "edges": {"exact": 0, "inside": 0, "root": 0} | _section(total, "edge"),
            "evidence": _section(total, "evidence"),
            "root_reasons": _section(total, "root_reason"),
            "root_classes": _section(total, "root_class"),
            "trajectories": {
                "total": total["figure", "trajectories"],
                "tokens": total["figure", "trajectory_tokens"],
                "by_session": _chains(self.accounts),
            },
            "rerender": {name: total["rerender", name] for name in ("edges", "kept", "tokens", "tokens_kept")},
            "drift": {
                "by_family": _drift_by_family(total, runs),
                "classes": _section(total, "drift_class"),
                "tokens_lost": {name: total["drift_lost", name] for name in _bin_names()},
            },
            "weight_versions": _section(total, "version"),
            "versions_by_session": {
                str(versions): sessions  # a key of JSON is a string
                for versions, sessions in sorted(Counter(len(a.of("version")) for a in self.accounts).items())
            },
            "disk": _disk(total, runs),
            "batch": None,
        }


def batch_report(plan: Plan, written: Sequence[Written], rewards: Mapping[SessionKey, float]) -> Report:
    """The accounting of the batches, for the report's `batch`. `written` has one element a batch."""
    return {
        "rows": sum(one.rows for one in written),
        "tokens": sum(one.tokens for one in written),
        "trained": sum(batch.trained for batch in plan.batches),
        "left_out": plan.left_out,
        "zero_advantage": sum(batch.flat_tokens for batch in plan.batches),
        "sessions_rewarded": len(rewards),
        "sessions_rewarded_without_trajectory": len(rewards) - sum(len(g.sessions) for g in plan.groups),
        "groups": [
            {"group_id": g.group_id, "sessions": len(g.sessions), "mean": g.mean, "std": g.std, "zero_variance": g.flat}
            for g in plan.groups
        ],
        "files": [
            {
                "file": one.file,
                "rows": one.rows,
                "tokens": one.tokens,
                "trained": batch.trained,
                "groups": len(batch.groups),
                "weight_sum": batch.weight_sum,
            }
            for batch, one in zip(plan.batches, written, strict=True)
        ],
    }


def bytes_on_disk(run: Path) -> int:
    """Bytes of a run's journals and sealed calls."""
    return sum(p.stat().st_size for folder in ("journal", "calls") for p in (run / folder).glob("*") if p.is_file())


# -- one session


def _count_call(counts: Counts, node: Node) -> None:
    call = node.call
    sampled = len(call.output_ids)
    counts["status", call.status] += 1
    counts["kind", call.kind] += 1
    counts["edge", node.edge.partition("(")[0]] += 1
    counts["figure", "sampled"] += sampled + call.after_stop
    if node.evidence:
        counts["evidence", node.evidence] += 1
    if call.parent is None and call.root_reason:
        counts["root_reason", call.root_reason] += 1
    if call.root_window:
        counts["root_class", json.loads(call.root_window)["class"]] += 1
    if node.reason:
        counts["calls_not_trained", node.reason] += 1
        if sampled:
            counts["not_trained", node.reason] += sampled
    if call.after_stop:
        counts["not_trained", "after_stop"] += call.after_stop
    for start, end, version in call.versions:
        counts["version", version] += end - start


def _count_rerenders(counts: Counts, forest: Forest) -> None:
    """Over calls with a stored parent: edges a re-render keeps; and, each parent once, sampled tokens it keeps."""
    by_key = {node.call.key: node.call for node in forest.nodes}
    kept_parents: dict[tuple[str, int], bool] = {}
    for node in forest.nodes:
        call, shared = node.call, node.call.rerender_shared
        if call.parent not in by_key or shared is None or not node.intact:
            continue
        kept = shared >= call.prompt_shared
        kept_parents[call.parent] = kept_parents.get(call.parent, False) or kept
        counts["rerender", "edges"] += 1
        counts["rerender", "kept"] += kept
        counts["audited", call.run_id] += 1
        counts["differing", call.run_id] += shared < call.prompt_len
        counts["drift_lost", _bin_of(call.prompt_shared - shared)] += 1
        if call.drift:
            counts["drift_class", json.loads(call.drift)["class"]] += 1
    for parent, kept in kept_parents.items():
        sampled = len(by_key[parent].output_ids)
        counts["rerender", "tokens"] += sampled
        counts["rerender", "tokens_kept"] += sampled if kept else 0


def _count_trained(counts: Counts, forest: Forest, built: Sequence[Trajectory]) -> None:
    """How many sampled tokens are on a loss mask, and how many on more than one."""
    leaves = {f"{node.call.call_id}.{node.call.choice}": index for index, node in enumerate(forest.nodes)}
    times = {i: np.zeros(len(node.call.output_ids), np.int32) for i, node in enumerate(forest.nodes)}
    for trajectory in built:
        index, end = leaves[trajectory.trajectory_id], len(trajectory.loss_mask)
        while index >= 0:
            node = forest.nodes[index]
            on_mask = trajectory.loss_mask[node.call.prompt_len : end]
            times[index][: len(on_mask)] += on_mask
            index, end = node.parent, node.shared
    for owners in times.values():
        counts["figure", "trained"] += int(np.count_nonzero(owners))
        counts["figure", "two_owners"] += int(np.count_nonzero(owners > 1))
    counts["figure", "trajectories"] += len(built)
    counts["figure", "trajectory_tokens"] += sum(len(trajectory.input_ids) for trajectory in built)


def _session_row(account: Account) -> dict[str, Any]:  # Any: a row of _SESSIONS
    figures = account.counts
    return {
        "run_id": account.session[0],
        "session_id": account.session[1],
        "group_id": account.group_id,
        "calls": sum(account.of("status").values()),
        "sampled": figures["figure", "sampled"],
        "trained": figures["figure", "trained"],
        "not_trained": [*account.of("not_trained").items()],
        "trajectories": figures["figure", "trajectories"],
        "trajectory_tokens": figures["figure", "trajectory_tokens"],
        "two_owners": figures["figure", "two_owners"],
        "versions": [*account.of("version")],
    }


# -- all of them


def _section(counts: Mapping[tuple[str, str], int], section: str) -> dict[str, int]:
    """Names and figures of a section, sorted by name."""
    return dict(sorted((name, count) for (of, name), count in counts.items() if of == section))


def _tokens(total: Counts) -> Report:
    sampled, trained = total["figure", "sampled"], total["figure", "trained"]
    return {
        "sampled": sampled,
        "trained": trained,
        "share": trained / sampled if sampled else 0.0,
        "not_trained": _section(total, "not_trained"),
        "two_owners": total["figure", "two_owners"],
    }


def _chains(accounts: Sequence[Account]) -> Report:
    """Trajectories a session."""
    chains = [account.counts["figure", "trajectories"] for account in accounts] or [0]
    return {"least": min(chains), "mean": sum(chains) / len(chains), "most": max(chains)}


def _drift_by_family(total: Counts, runs: Iterable[Path]) -> Report:
    """Of the bridged prompts that were rendered anew, how many differ from the render, by the model's family."""
    family_of = {info.get("run_id", run.name): info.get("family") for run in runs if (info := calls.run_info(run))}
    families: dict[str, Report] = {}
    for run_id, audited in _section(total, "audited").items():
        family = families.setdefault(family_of.get(run_id) or "unknown", {"audited": 0, "differing": 0})
        family["audited"] += audited
        family["differing"] += total["differing", run_id]
    return dict(sorted(families.items()))


def _bin_names() -> list[str]:
    return ["0", *(f"<={end}" for end in DRIFT_BINS), f">{DRIFT_BINS[-1]}"]


def _bin_of(lost: int) -> str:
    return _bin_names()[0 if lost <= 0 else 1 + int(np.searchsorted(DRIFT_BINS, lost))]


def _disk(total: Counts, runs: Iterable[Path]) -> Report:
    size, sampled = sum(map(bytes_on_disk, runs)), total["figure", "sampled"]
    return {"bytes": size, "per_sampled_token": size / sampled if sampled else None}
