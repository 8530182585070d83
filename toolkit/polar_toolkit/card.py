"""The dataset card of a merged folder: its report as a README.md that people and dataset hubs read.

Invariant: every figure on it is the report's, written out in full; it counts nothing itself, and it says that prompts
are data and may hold secrets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polar_toolkit.ledger import Report

_HEAD = """---
pretty_name: {quoted}
task_categories:
- reinforcement-learning
tags:
- agents
- polar-mitm
size_categories:
- {size}
configs:
{configs}
---

# {name}

Token-exact trajectories of agent sessions, merged from the runs {runs} by `polar-toolkit merge`. This card is made from
`report.json`, which holds the same figures.

**Prompts are data.** Whatever the harnesses put into their prompts stands here as token ids, exactly as it was sent:
file contents, environment variables, keys. Nothing was removed from it. Look before you share this folder.
"""

_TRAJECTORY_COLUMNS = {
    "schema_version": "version of this schema",
    "trajectory_id": "call and choice at which the path ends",
    "run_id": "the run it was recorded in",
    "session_id": "one harness run; rewards belong to sessions",
    "group_id": "samples of one task; null if none was registered",
    "kind": "what the last call was for",
    "input_ids": "token ids of the whole path: prompts and what was sampled",
    "loss_mask": "1 on a sampled token that is trained here, 0 elsewhere; over all trajectories each at most once",
    "logprobs": "log-probability of the sampled token under its temperature; 0 off the mask",
    "versions": "weight version that sampled the token; empty off the mask",
    "temperature": "applied temperature; 1 off the mask",
    "call_ids": "the calls of the path, root first",
    "call_starts": "where the tokens that each call sampled begin",
    "edges": "how each call continues the one before it: exact, inside(n), or root(reason) for the first",
    "reward": "the session's reward; null if none was given",
}
_BATCH_COLUMNS = {
    "schema_version": "version of this schema",
    "input_ids": "trajectories one after the other, each whole or cut at its end",
    "position_ids": "position inside the trajectory; restarts at 0",
    "loss_mask": "1 on tokens that bear loss",
    "old_logprobs": "log-probability at sampling time, of logits / temperature; 0 off the mask",
    "advantages": "the session's advantage; 0 off the mask",
    "versions": "weight version that sampled the token; empty off the mask",
    "temperature": "applied temperature; 1 off the mask",
    "loss_weight": "the token's share of the loss; the file's metadata say what all of a batch add up to",
    "session_ids": "session of each packed trajectory",
    "group_ids": "group of each packed trajectory",
    "trajectory_ids": "name of each packed trajectory",
    "lengths": "tokens of each packed trajectory",
}


def text(report: Report) -> str:
    """The card, Markdown behind the YAML head that dataset hubs read."""
    batch = report["batch"]
    parts = [_head(report), _tokens(report), _calls(report), _table("Trajectories", "column", _TRAJECTORY_COLUMNS)]
    if batch is not None:
        parts += [_batch(batch), _table("Columns of a batch", "column", _BATCH_COLUMNS)]
    return "\n".join(parts)


def _head(report: Report) -> str:
    folders = ["trajectories"] + (["batches"] if report["batch"] and report["batch"]["rows"] else [])
    configs = "\n".join(f"- config_name: {name}\n  data_files: {name}/*.parquet" for name in folders)
    runs = ", ".join(f"`{run}`" for run in report["runs"])
    name = "polar-mitm: " + ", ".join(report["runs"])
    return _HEAD.format(
        name=name, quoted=json.dumps(name), size=_size(report["trajectories"]["total"]), configs=configs, runs=runs
    )


def _size(rows: int) -> str:
    """The hubs' name for a number of rows."""
    ends = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M"}
    return next((name for end, name in ends.items() if rows < end), "n>1M")


def _tokens(report: Report) -> str:
    tokens = report["tokens"]
    figures = {"sampled": tokens["sampled"], "trained": tokens["trained"], "two owners": tokens["two_owners"]}
    figures |= {f"not trained: {reason}": count for reason, count in tokens["not_trained"].items()}
    return _table("Sampled tokens", "what", figures)


def _calls(report: Report) -> str:
    figures = {
        "sessions": report["sessions"],
        "calls": report["calls"]["total"],
        **_each("calls by status", report["calls"]["by_status"]),
        **_each("calls by kind", report["calls"]["by_kind"]),
        **_each("calls not trained", report["calls_not_trained"]),
        **_each("edges", report["edges"]),
        **_each("edges shown by", report["evidence"]),
        **_each("roots", report["root_reasons"]),
        "trajectories": report["trajectories"]["total"],
        "tokens of trajectories": report["trajectories"]["tokens"],
        **_each("tokens of weight version", report["weight_versions"]),
        **_each("option", report["options"]),
    }
    return _table("Calls", "what", figures)


def _batch(batch: Report) -> str:
    figures = {
        "files": len(batch["files"]),
        "rows": batch["rows"],
        "tokens": batch["tokens"],
        "tokens trained": batch["trained"],
        "tokens trained with advantage 0": batch["zero_advantage"],
        **_each("tokens left out", batch["left_out"]),
        "groups": len(batch["groups"]),
        "groups of equal rewards": sum(group["zero_variance"] for group in batch["groups"]),
        "sessions with a reward": batch["sessions_rewarded"],
        "of them without a trajectory": batch["sessions_rewarded_without_trajectory"],
        **_each("option", batch["options"]),
    }
    return _table("Batches", "what", figures)


def _each(what: str, counts: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON values of the report
    return {f"{what}: {name}": value for name, value in counts.items()}


def _table(title: str, what: str, rows: Mapping[str, Any]) -> str:  # Any: JSON values of the report
    return "\n".join((f"## {title}\n", f"| {what} | |", "| --- | --- |", *map(_row, rows.items()), ""))


def _row(item: tuple[str, Any]) -> str:  # Any: a JSON value of the report
    name, value = item
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else "none" if value is None else str(value)
    return f"| {_cell(name)} | {_cell(shown)} |"


def _cell(words: str) -> str:
    """A harness's or a user's name may hold what Markdown reads as the end of a cell."""
    return words.replace("|", "\\|").replace("\n", " ")
