"""slime and miles: one `Sample.to_dict()` a line, the elements of `samples` in a file of `--load-debug-rollout-data`.

Invariant: `loss_mask` and `rollout_log_probs` are as long as the response, and all rows of a session share its
`rollout_id` and reward, so it counts once in its group. The torch file is made by the loader (docs/export.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polar_toolkit.export.files import write_lines
from polar_toolkit.export.source import Format, Source
from polar_toolkit.export.token_rows import TokenRow, token_rows


def write(folder: Path, source: Source) -> None:
    """Write samples.jsonl."""
    write_lines(folder / "samples.jsonl", _rows(source))


FORMAT = Format("slime", "Sample dicts as JSON lines, for slime and miles", write)


def _rows(source: Source) -> Iterator[dict[str, Any]]:  # Any: JSON values and arrays
    return (_sample(row) for row in token_rows(source))


def _sample(row: TokenRow) -> dict[str, Any]:  # Any: JSON values and arrays
    run_id, session_id = row.member.session
    return {
        "group_index": row.member.group_number,
        "index": row.number,
        "rollout_id": row.member.number,
        "prompt": "",
        "tokens": row.ids,
        "response": "",
        "response_length": len(row.response_ids),
        "label": None,
        "reward": row.member.reward,
        "loss_mask": row.loss_mask,
        "weight_versions": row.versions,
        "rollout_log_probs": row.logprobs,
        "rollout_routed_experts": None,
        "remove_sample": False,
        "status": "truncated" if row.truncated else "completed",
        "metadata": {
            "run_id": run_id,
            "session_id": session_id,
            "group_id": row.member.group,
            "trajectory_id": row.trajectory_id,
            "kind": row.kind,
        },
        "train_metadata": None,
        "session_id": session_id,
    }
