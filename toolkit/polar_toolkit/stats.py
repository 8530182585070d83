"""The accounting: where every sampled token of a set of runs went, as plain data and as tables for people.

Invariant: sampled = trained + the sum over all reasons. It reads forests and trajectories and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from rich.table import Table

from polar_toolkit.batches import Batch
from polar_toolkit.calls import SessionKey
from polar_toolkit.trajectories import Trajectory
from polar_toolkit.tree import Forest

Report = dict[str, Any]  # Any: JSON values, the contents of report.json
REPORT_VERSION = 1

_CALLS = {
    "run_id": pl.String, "session_id": pl.String, "kind": pl.String, "status": pl.String, "reason": pl.String,
    "edge": pl.String, "root_reason": pl.String, "by_tokens": pl.Boolean, "sampled": pl.Int64,
    "call_id": pl.String, "parent_id": pl.String, "parent_sampled": pl.Int64, "rerendered": pl.Boolean,
    "after_stop": pl.Int64,
}  # fmt: skip


class Ledger:
    """Adds up forests and their trajectories, one session at a time, keeping no token arrays."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, ...]] = []  # Any: rows of _CALLS
        self._versions: dict[str, int] = {}
        self._trajectories = 0
        self._trajectory_tokens = 0
        self._trained = 0

    def add(self, forest: Forest, built: Sequence[Trajectory]) -> None:
        """Account for one session."""
        self._calls.extend(_call_rows(forest))
        for node in forest.nodes:
            for start, end, version in node.call.versions:
                self._versions[version] = self._versions.get(version, 0) + end - start
        self._trajectories += len(built)
        self._trajectory_tokens += sum(len(t.input_ids) for t in built)
        self._trained += sum(int(t.loss_mask.sum()) for t in built)

    def report(self, runs: Sequence[Path]) -> Report:
        """The accounting of everything added, as JSON values."""
        calls = pl.DataFrame(self._calls, schema=_CALLS, orient="row")
        after_stop = int(calls["after_stop"].sum())
        sampled = int(calls["sampled"].sum()) + after_stop
        lost = calls.filter(pl.col("reason").is_not_null())
        disk = sum(bytes_on_disk(run) for run in runs)
        return {
            "report_version": REPORT_VERSION,
            "runs": [run.name for run in runs],
            "sessions": calls.select("run_id", "session_id").n_unique(),
            "calls": {"total": len(calls), "by_status": _counts(calls, "status"), "by_kind": _counts(calls, "kind")},
            "tokens": {
                "sampled": sampled,
                "trained": self._trained,
                "share": self._trained / sampled if sampled else 0.0,
                "not_trained": _token_sums(lost, "reason") | ({"after_stop": after_stop} if after_stop else {}),
            },
            "calls_not_trained": _counts(lost, "reason"),
            "edges": _edges(calls),
            "root_reasons": _counts(calls.filter(pl.col("root_reason").is_not_null()), "root_reason"),
            "trajectories": {"total": self._trajectories, "tokens": self._trajectory_tokens},
            "rerender": _rerender(calls),
            "weight_versions": dict(sorted(self._versions.items())),
            "disk": {"bytes": disk, "per_sampled_token": disk / sampled if sampled else None},
            "batch": None,
        }


def batch_report(batch: Batch, rewards: Mapping[SessionKey, float]) -> Report:
    """The accounting of a batch, for the report's `batch`."""
    return {
        "rows": len(batch.table),
        "tokens": int(sum(sum(lengths) for lengths in batch.table["lengths"].to_pylist())),
        "trained": batch.trained,
        "left_out": batch.left_out,
        "zero_advantage": batch.flat_tokens,
        "sessions_rewarded": len(rewards),
        "sessions_rewarded_without_trajectory": len(rewards) - sum(len(g.sessions) for g in batch.groups),
        "groups": [
            {"group_id": g.group_id, "sessions": len(g.sessions), "mean": g.mean, "std": g.std, "zero_variance": g.flat}
            for g in batch.groups
        ],
    }


def bytes_on_disk(run: Path) -> int:
    """Bytes of a run's journals and sealed calls."""
    return sum(p.stat().st_size for folder in ("journal", "calls") for p in (run / folder).glob("*") if p.is_file())


def tables(report: Report) -> list[Table]:
    """The accounting for people."""
    built = [_token_table(report), _call_table(report)]
    if report["batch"] is not None:
        built.append(_group_table(report["batch"]))
    return built


def rerender_line(report: Report) -> str:
    """What training on a plain re-render of the harness's history would have kept of the same calls."""
    seen = report["rerender"]
    if not seen["edges"]:
        return "re-render baseline: no call with a parent was re-rendered"
    share = seen["tokens_kept"] / seen["tokens"] if seen["tokens"] else 0.0
    return (
        f"re-render baseline: kept {seen['kept']} of {seen['edges']} edges / "
        f"{share:.1%} of sampled tokens would stay in an exact prefix"
    )


def _call_rows(forest: Forest) -> Iterable[tuple[Any, ...]]:  # Any: rows of _CALLS
    by_key = {node.call.key: node.call for node in forest.nodes}
    for node in forest.nodes:
        call = node.call
        parent = None if call.parent is None else by_key.get(call.parent)
        judged = parent is not None and call.rerender_shared is not None and node.intact
        yield (
            *call.session, call.kind, call.status, node.reason if len(call.output_ids) or node.reason else None,
            node.edge.partition("(")[0], call.root_reason if call.parent is None else None, node.evidence == "tokens",
            len(call.output_ids), call.call_id,
            f"{parent.call_id}.{parent.choice}" if parent is not None else None,
            len(parent.output_ids) if parent is not None else None,
            (call.rerender_shared or 0) >= call.prompt_shared if judged else None,
            call.after_stop,
        )  # fmt: skip


def _counts(frame: pl.DataFrame, name: str) -> dict[str, int]:
    counted = frame.group_by(name).len().sort(name)
    return dict(zip(counted[name].to_list(), counted["len"].to_list(), strict=True))


def _token_sums(frame: pl.DataFrame, name: str) -> dict[str, int]:
    summed = frame.group_by(name).agg(pl.col("sampled").sum()).filter(pl.col("sampled") > 0).sort(name)
    return dict(zip(summed[name].to_list(), summed["sampled"].to_list(), strict=True))


def _edges(calls: pl.DataFrame) -> dict[str, int]:
    seen = {"exact": 0, "inside": 0, "root": 0} | _counts(calls, "edge")
    return seen | {"found_by_tokens": int(calls["by_tokens"].sum())}


def _rerender(calls: pl.DataFrame) -> dict[str, int]:
    """Over calls with a stored parent: edges a re-render keeps; and, each parent once, sampled tokens it keeps."""
    judged = calls.filter(pl.col("rerendered").is_not_null())
    parents = judged.group_by("run_id", "session_id", "parent_id").agg(
        pl.col("parent_sampled").first(), pl.col("rerendered").any()
    )
    return {
        "edges": len(judged),
        "kept": int(judged["rerendered"].sum()),
        "tokens": int(parents["parent_sampled"].sum()),
        "tokens_kept": int(parents.filter(pl.col("rerendered"))["parent_sampled"].sum()),
    }


def _token_table(report: Report) -> Table:
    table = Table("tokens", "count", "share", title="Sampled tokens")
    tokens, sampled = report["tokens"], max(1, report["tokens"]["sampled"])
    table.add_row("sampled", f"{tokens['sampled']:,}", "")
    table.add_row("trained", f"{tokens['trained']:,}", f"{tokens['share']:.1%}")
    for reason, count in tokens["not_trained"].items():
        table.add_row(f"  not: {reason}", f"{count:,}", f"{count / sampled:.1%}")
    if report["batch"] is not None:
        table.add_row("in the batch", f"{report['batch']['trained']:,}", f"{report['batch']['trained'] / sampled:.1%}")
        for reason, count in report["batch"]["left_out"].items():
            table.add_row(f"  not: {reason}", f"{count:,}", f"{count / sampled:.1%}")
    return table


def _call_table(report: Report) -> Table:
    table = Table("what", "figure", title="Calls", show_header=False)
    disk = report["disk"]["per_sampled_token"]
    rows = {
        "sessions": report["sessions"],
        "calls": report["calls"]["total"],
        "  by status": _listed(report["calls"]["by_status"]),
        "  by kind": _listed(report["calls"]["by_kind"]),
        "  not trained": _listed(report["calls_not_trained"]),
        "edges": _listed(report["edges"]),
        "  roots": _listed(report["root_reasons"]),
        "trajectories": f"{report['trajectories']['total']} ({report['trajectories']['tokens']:,} tokens)",
        "weight versions": _listed(report["weight_versions"]),
        "bytes on disk": f"{report['disk']['bytes']:,}" + (f" ({disk:.1f} a sampled token)" if disk else ""),
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _group_table(batch: Report) -> Table:
    table = Table("group", "sessions", "mean reward", "std", "", title=f"Batch: {batch['rows']} rows")
    for group in batch["groups"]:
        note = "all equal: advantage 0" if group["zero_variance"] else ""
        table.add_row(group["group_id"], str(group["sessions"]), f"{group['mean']:.3f}", f"{group['std']:.3f}", note)
    return table


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
