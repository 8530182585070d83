"""Runs on disk to `Call` values: the columns of the calls table that merging needs, without copying token buffers.

Invariant: every row of a run becomes one Call, and calls are ordered by (writer, sequence, choice), whatever the order
of the rows. This module does not rebuild prompts (prompts.py) and judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from polar_mitm import journal
from polar_mitm.rows import SCHEMA
from polar_toolkit.errors import Refusal, UnreadableFile

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
SessionKey = tuple[str, str]
"""(run_id, session_id): the name of a session is only unique inside its run."""

_SCALARS = (
    "run_id", "writer", "sequence", "call_id", "choice", "session_id", "group_id", "thread_id", "kind", "status",
    "parent_call_id", "parent_choice", "root_reason", "prompt_len", "prompt_shared", "prompt_hash", "versions",
    "temperature", "trainable", "untrainable_reason", "client_delivered", "rerender_shared", "drift", "root_window",
    "parent_evidence", "kept_len",
)  # fmt: skip
_BUFFERS = ("prompt_suffix", "output_ids", "logprobs")
COLUMNS = (*_SCALARS, *_BUFFERS)
"""The columns of the calls table that a Call is made of."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One row of the calls table: a request and one choice of its answer. Columns are explained in polar_mitm.rows."""

    run_id: str
    writer: str
    sequence: int
    call_id: str
    choice: int
    session_id: str
    group_id: str | None
    thread_id: str | None
    kind: str
    status: str
    parent: tuple[str, int] | None
    """(call_id, choice) of the stored parent."""
    root_reason: str | None
    prompt_len: int
    prompt_shared: int
    prompt_suffix: Int32s
    prompt_hash: bytes | None
    output_ids: Int32s
    """Those that the answer stands for: what was sampled behind a stop string is on no path and never trained."""
    logprobs: Float32s
    after_stop: int
    """How many more tokens were sampled, behind a stop string that ended the answer."""
    versions: tuple[tuple[int, int, str], ...]
    """(start, end, weight version) over output_ids."""
    temperature: float | None
    trainable: bool
    untrainable_reason: str | None
    delivered: bool
    rerender_shared: int | None
    evidence: str | None
    """How the stored parent was found: pointer or history."""
    drift: str | None
    """JSON of the column `drift`."""
    root_window: str | None
    """JSON of the column `root_window`."""

    @property
    def order(self) -> tuple[str, int, int]:
        """What calls are sorted by: a writer is named by its start, and counts its calls."""
        return self.writer, self.sequence, self.choice

    @property
    def key(self) -> tuple[str, int]:
        """What other calls point at."""
        return self.call_id, self.choice

    @property
    def session(self) -> SessionKey:
        """The session, unique over runs."""
        return self.run_id, self.session_id

    @property
    def tip_len(self) -> int:
        """Tokens of the prompt and the output together."""
        return self.prompt_len + len(self.output_ids)


def find_runs(root: Path) -> list[Path]:
    """`root` itself when it is a run folder, else those of its folders that are; sorted by name. Raises Refusal."""
    if _is_run(root):
        return [root]
    runs = sorted(path for path in root.iterdir() if _is_run(path)) if root.is_dir() else []
    if not runs:
        raise Refusal(
            f"{root} holds no run: neither it nor a folder in it has journal/ or calls/; "
            f"record one with: mitmdump -s addons/polar.py --set polar_run={root}/first --set polar_engine=URL"
        )
    return runs


def run_info(run: Path) -> dict[str, Any]:  # Any: JSON values
    """The contents of RUN/run.json; empty when the run has none. Raises UnreadableFile."""
    path = run / "run.json"
    if not path.is_file():
        return {}
    try:
        info = json.loads(path.read_text())
    except ValueError as error:
        raise UnreadableFile(f"{path} is not JSON ({error}); restore it or remove it") from error
    if not isinstance(info, dict):
        raise UnreadableFile(f"{path} is not a JSON object; restore it or remove it")
    return info


def read(run: Path) -> list[Call]:
    """All calls of a run, sealed and live, in order. Raises UnreadableFile that names the file."""
    return from_table(table(run, COLUMNS))


def table(run: Path, columns: Sequence[str] = SCHEMA.names, session_id: str | None = None) -> pa.Table:
    """The calls table of a run or of one session, as polar_mitm.rows.SCHEMA; others than `columns` may be null.

    Raises UnreadableFile that names the file.
    """
    try:
        return journal.read_calls(run, session_id, columns)
    except journal.UnreadableRun as error:
        raise UnreadableFile(str(error)) from error


def from_table(rows: pa.Table) -> list[Call]:
    """The calls of a table with the columns of polar_mitm.rows.SCHEMA, in order. Token buffers are one copy of it."""
    whole = rows.select(COLUMNS).combine_chunks()  # live journals come as one chunk a call
    calls = [call for batch in whole.to_batches() for call in _from_batch(batch)]
    return sorted(calls, key=lambda call: call.order)


def by_session(calls: Iterable[Call]) -> dict[SessionKey, list[Call]]:
    """Calls grouped by session, sessions in order of their key, calls in the order given."""
    sessions: dict[SessionKey, list[Call]] = {}
    for call in calls:
        sessions.setdefault(call.session, []).append(call)
    return dict(sorted(sessions.items()))


def _is_run(path: Path) -> bool:
    return (path / "journal").is_dir() or (path / "calls").is_dir()


def _from_batch(batch: pa.RecordBatch) -> Iterator[Call]:
    scalars = batch.select(list(_SCALARS)).to_pylist()
    buffers = zip(*(_views(batch.column(name)) for name in _BUFFERS), strict=True)
    for row, (suffix, output, logprobs) in zip(scalars, buffers, strict=True):
        yield _call(row, suffix, output, logprobs)


def _views(column: pa.ListArray) -> list[npt.NDArray[Any]]:  # Any: int32 or float32, by the schema
    values = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy().tolist()
    return [values[start:end] for start, end in pairwise(offsets)]


def _call(row: dict[str, Any], suffix: Int32s, output: Int32s, logprobs: Float32s) -> Call:  # Any: a row's values
    parent = row["parent_call_id"]
    return Call(
        run_id=row["run_id"] or "",
        writer=row["writer"] or "",
        sequence=row["sequence"] or 0,
        call_id=row["call_id"] or "",
        choice=row["choice"] or 0,
        session_id=row["session_id"] or "",
        group_id=row["group_id"],
        thread_id=row["thread_id"],
        kind=row["kind"] or "unknown",
        status=row["status"] or "unknown",
        parent=None if parent is None else (parent, row["parent_choice"] or 0),
        root_reason=row["root_reason"],
        prompt_len=row["prompt_len"] or 0,
        prompt_shared=row["prompt_shared"] or 0,
        prompt_suffix=suffix,
        prompt_hash=row["prompt_hash"],
        output_ids=output[: row["kept_len"]],
        logprobs=logprobs[: row["kept_len"]],
        after_stop=0 if row["kept_len"] is None else max(0, len(output) - row["kept_len"]),
        versions=tuple((span["start"], span["end"], span["version"]) for span in row["versions"] or ()),
        temperature=row["temperature"],
        trainable=bool(row["trainable"]),
        untrainable_reason=row["untrainable_reason"],
        delivered=bool(row["client_delivered"]),
        rerender_shared=row["rerender_shared"],
        evidence=row["parent_evidence"],
        drift=row["drift"],
        root_window=row["root_window"],
    )
