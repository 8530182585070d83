"""Harbor 0.25: the `rollout_details` of each session, one entry a turn, as the runner's `AgentContext` holds them.

Invariant: a turn's completion is a run of tokens that are trained here and no further, and its prompt is everything
before it, so a reader that trains on all completions trains each sampled token once. The main agent's rows come first.
Prompts are written whole, as the format wants: the file grows with the square of a session's length.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from polar_toolkit.calls import SessionKey
from polar_toolkit.export.files import write_lines
from polar_toolkit.export.source import Format, Source
from polar_toolkit.export.token_rows import TokenRow, token_rows


def write(folder: Path, source: Source) -> None:
    """Write rollout_details.jsonl, a line a session."""
    rows = token_rows(source, rewarded=False)
    sessions = groupby(rows, key=lambda row: row.member.session)
    write_lines(folder / "rollout_details.jsonl", (_session(key, list(own)) for key, own in sessions))


FORMAT = Format("harbor", "RolloutDetail of each session: its turns with whole prompts", write)


def _session(key: SessionKey, rows: list[TokenRow]) -> dict[str, Any]:  # Any: JSON values and arrays
    ordered = sorted(rows, key=lambda row: row.kind != "agent")
    return {
        "run_id": key[0],
        "session_id": key[1],
        "group_id": rows[0].member.group,
        "reward": rows[0].member.reward,
        "rollout_details": [_detail(row) for row in ordered],
    }


def _detail(row: TokenRow) -> dict[str, Any]:  # Any: lists of arrays
    turns, ids, before = list(_turns(row)), row.ids, len(row.prompt_ids)
    return {
        "prompt_token_ids": [ids[: before + start] for start, _ in turns],
        "completion_token_ids": [row.response_ids[start:end] for start, end in turns],
        "logprobs": [row.logprobs[start:end] for start, end in turns],
        "extra": {"trajectory_id": [row.trajectory_id] * len(turns), "kind": [row.kind] * len(turns)},
    }


def _turns(row: TokenRow) -> Iterator[tuple[int, int]]:
    """Start and end, in the response, of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(row.loss_mask, prepend=0, append=0).astype(bool))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
