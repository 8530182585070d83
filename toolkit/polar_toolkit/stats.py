"""The accounting as tables for people.

Invariant: it shows what the report holds (ledger.py) and counts nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
from rich.table import Table

from polar_toolkit.ledger import Report


def tables(report: Report) -> list[Table]:
    """The accounting for people."""
    built = [_token_table(report), _call_table(report)]
    if report["rerender"]["edges"]:
        built.append(_drift_table(report))
    if report["batch"] is not None:
        built.append(_group_table(report["batch"]))
    return built


def session_table(sessions: pa.Table) -> Table:
    """One line a session (`Ledger.sessions`)."""
    table = Table()
    for name in ("run", "session", "group", "calls", "sampled", "trained", "not trained", "trajectories", "versions"):
        table.add_column(name, overflow="fold")  # a narrow terminal cuts no name short
    for row in sessions.to_pylist():
        table.add_row(
            row["run_id"], row["session_id"], row["group_id"] or "", f"{row['calls']:,}", f"{row['sampled']:,}",
            f"{row['trained']:,}", _listed(dict(row["not_trained"])), str(row["trajectories"]),
            ", ".join(row["versions"]),
        )  # fmt: skip
    return table


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


def _token_table(report: Report) -> Table:
    table = Table("tokens", "count", "share", title="Sampled tokens")
    tokens, sampled = report["tokens"], max(1, report["tokens"]["sampled"])
    table.add_row("sampled", f"{tokens['sampled']:,}", "")
    table.add_row("trained", f"{tokens['trained']:,}", f"{tokens['share']:.1%}")
    table.add_row("  more than once", f"{tokens['two_owners']:,}", "must be 0")
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
        "  shown by": _listed(report["evidence"]),
        "  roots": _listed(report["root_reasons"]),
        "  roots with a history": _listed(report["root_classes"]),
        "trajectories": f"{report['trajectories']['total']} ({report['trajectories']['tokens']:,} tokens)",
        "  a session": "{least} to {most}, {mean:.2f} on average".format(**report["trajectories"]["by_session"]),
        "weight versions": _listed(report["weight_versions"]),
        "  in a session": ", ".join(f"{n} in {count:,}" for n, count in report["versions_by_session"].items()),
        "bytes on disk": f"{report['disk']['bytes']:,}" + (f" ({disk:.1f} a sampled token)" if disk else ""),
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _drift_table(report: Report) -> Table:
    """Of the bridged prompts that were rendered anew: how many differ, how, and what that would have lost."""
    drift = report["drift"]
    table = Table("what", "figure", title="Bridged prompts against a plain re-render", show_header=False)
    for family, seen in drift["by_family"].items():
        share = seen["differing"] / seen["audited"]
        table.add_row(f"family {family}", f"{seen['differing']:,} of {seen['audited']:,} differ ({share:.1%})")
    table.add_row("how they differ", _listed(drift["classes"]))
    table.add_row("tokens of the parent's path lost: prompts", _listed(drift["tokens_lost"]))
    return table


def _group_table(batch: Report) -> Table:
    table = Table("group", "sessions", "mean reward", "std", "", title=f"Batch: {batch['rows']} rows")
    for group in batch["groups"]:
        note = "all equal: advantage 0" if group["zero_variance"] else ""
        table.add_row(group["group_id"], str(group["sessions"]), f"{group['mean']:.3f}", f"{group['std']:.3f}", note)
    return table


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
