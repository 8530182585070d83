"""How an attempt ended: one row of rollouts.parquet, whatever happened.

Invariant: every attempt that was planned has exactly one row in the end; a row that has no reward is not trained, and
its status and note say why. The schema is declared once, here. It reads and writes no state of a running rollout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FILE = "rollouts.parquet"


class Status(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    """The harness ended by itself after at least one completed call, and was judged."""
    TIMEOUT = "timeout"
    """The harness was ended by its deadline or budget; its partial trace was judged."""
    HARNESS_ERROR = "harness_error"
    """No completed call, or a limit of the sandbox was broken."""
    SETUP_FAILED = "setup_failed"
    """The sandbox, or a prepare command, failed before the harness started."""
    EVALUATOR_FAILED = "evaluator_failed"
    """The harness's work could not be judged."""
    CANCELLED = "cancelled"
    """Not finished: the group had enough, or the rollout was stopped."""


TRAINED = (Status.COMPLETED, Status.TIMEOUT)
"""Statuses whose rewards are written unless the user says otherwise; the others are masked."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row."""

    attempt_id: str
    session_id: str
    group_id: str
    task_id: str
    sample: int
    tries: int
    seed: int
    status: Status
    note: str = ""
    """One sentence where something went wrong, naming the value and the remedy."""
    reward: float | None = None
    """None where nothing was judged."""
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    trained: bool = False
    """Whether its reward was written to rewards.jsonl."""
    exit_code: int | None = None
    """Of the harness; never what success is judged by."""
    init_s: float = 0.0
    ready_s: float = 0.0
    """Seconds that it waited, prepared, for its turn to run."""
    run_s: float = 0.0
    post_s: float = 0.0
    calls: int = 0
    """Completed model calls of the session."""
    sampled_tokens: int = 0
    refused_calls: int = 0
    """Calls that were refused: over the budget, or after the session was sealed."""
    harness: str = ""
    harness_version: str = ""
    way: str = ""
    """The run of the harness's recipe."""
    sandbox: str = ""
    image: str = ""
    began: str = ""
    """UTC, ISO 8601."""
    artifacts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name -> path, relative to the run folder: logs, patch, report."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Any: JSON

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Plain values."""
        return asdict(self)


SCHEMA = pa.schema(
    [
        ("attempt_id", pa.string()),
        ("session_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("sample", pa.int32()),
        ("tries", pa.int32()),
        ("seed", pa.int64()),
        ("status", pa.string()),
        ("note", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.string()),
        ("trained", pa.bool_()),
        ("exit_code", pa.int32()),
        ("init_s", pa.float64()),
        ("ready_s", pa.float64()),
        ("run_s", pa.float64()),
        ("post_s", pa.float64()),
        ("calls", pa.int32()),
        ("sampled_tokens", pa.int64()),
        ("refused_calls", pa.int32()),
        ("harness", pa.string()),
        ("harness_version", pa.string()),
        ("way", pa.string()),
        ("sandbox", pa.string()),
        ("image", pa.string()),
        ("began", pa.string()),
        ("artifacts", pa.string()),
        ("metadata", pa.string()),
    ]
)
"""reward_parts, artifacts and metadata are JSON objects."""
_AS_JSON = ("reward_parts", "artifacts", "metadata")


def from_json(row: Mapping[str, Any]) -> Outcome:  # Any: JSON
    """The inverse of `Outcome.as_json`."""
    fields: dict[str, Any] = {**row, "status": Status(row["status"])}  # Any: JSON
    return Outcome(**fields)


def table(outcomes: Iterable[Outcome]) -> pa.Table:
    """Rows in the order of their attempts."""
    rows = [{**o.as_json(), **{name: json.dumps(getattr(o, name)) for name in _AS_JSON}} for o in outcomes]
    return pa.Table.from_pylist(sorted(rows, key=lambda row: (row["task_id"], row["sample"])), schema=SCHEMA)


def write(run: Path, outcomes: Iterable[Outcome]) -> Path:
    """Write RUN/rollouts.parquet in one step; an earlier one is replaced."""
    path = run / FILE
    temporary = path.with_name(f".{FILE}.new")
    pq.write_table(table(outcomes), temporary)
    return temporary.replace(path)
