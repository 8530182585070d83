"""The finished calls of a session, read back from the run folder.

Invariant: a call that is read back is the call that was kept: its row holds all of it but the outline of its body, so
that the body of the first call after it is stored whole. Only the rows of the session are held, and for the reading
only. This module writes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar_mitm.journal import read_calls
from polar_mitm.tips import Kept, Place

_TOKENS = ("prompt_suffix", "output_ids")
_PLAIN = (
    "session_id", "call_id", "choice", "status", "parent_call_id", "parent_choice", "kept_len", "history_key",
    "tools_key",
    "thread_id", "kind", "dialect", "messages", "tools", "reply", "answer", "request",
)  # fmt: skip


def earlier_calls(run: Path, session_id: str) -> list[Kept]:
    """The completed calls of a session, parents before their children. Raises UnreadableRun."""
    table = read_calls(run, session_id, [*_PLAIN, *_TOKENS])
    lists = {name: table.column(name).combine_chunks() for name in _TOKENS}
    instructed: dict[Place, bool] = {}
    calls: list[Kept] = []
    for index, row in enumerate(table.select(_PLAIN).to_pylist()):
        place = row["call_id"], row["choice"]
        instructed[place] = _instructed(row, instructed)
        if row["status"] == "completed":
            tokens = {name: _array(values[index].values) for name, values in lists.items()}
            calls.append(Kept.of(row | tokens, instructed=instructed[place]))
    return calls


def _instructed(row: dict[str, Any], known: dict[Place, bool]) -> bool:  # Any: a row
    """Whether the request had `instructions`, perhaps the same as its parent's."""
    request = json.loads(row["request"] or "{}")
    if not isinstance(request, dict):  # a refused request's body is text
        return False
    same = "instructions" in request.get("$same", ())
    return (
        known.get((row["parent_call_id"], row["parent_choice"]), False) if same else bool(request.get("instructions"))
    )


def _array(values: Any) -> NDArray[np.int32]:  # Any: an Arrow array of integers
    return values.to_numpy(zero_copy_only=False).astype(np.int32)
