"""verl 0.9: one Parquet row an `AgentLoopOutput`, with the names from which its batches are keyed.

Invariant: `uid`, `session_id` and `index` are those of verl's key `{uid}_{session_id}_{index}`, so its GRPO counts a
session once, whatever number of rows it has. Padding is the loader's (docs/export.md), since it knows the widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from polar_toolkit.export.files import write_table
from polar_toolkit.export.source import Format, Source
from polar_toolkit.export.token_rows import token_rows

SCHEMA = pa.schema(
    [
        pa.field("uid", pa.string()),
        pa.field("session_id", pa.int32()),
        pa.field("index", pa.int32()),
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("response_ids", pa.list_(pa.int32())),
        pa.field("response_mask", pa.list_(pa.uint8())),
        pa.field("response_logprobs", pa.list_(pa.float32())),
        pa.field("reward_score", pa.float64()),
        pa.field("num_turns", pa.int32()),
        pa.field("min_global_steps", pa.int32()),
        pa.field("max_global_steps", pa.int32()),
        pa.field("group_id", pa.string()),
        pa.field("run_id", pa.string()),
        pa.field("session_name", pa.string()),
        pa.field("trajectory_id", pa.string()),
    ]
)


def write(folder: Path, source: Source) -> None:
    """Write agent_loop_outputs.parquet."""
    write_table(folder / "agent_loop_outputs.parquet", SCHEMA, _rows(source))


FORMAT = Format("verl", "AgentLoopOutput rows in Parquet, which a short loader pads into a DataProto", write)


def _rows(source: Source) -> Iterator[dict[str, Any]]:  # Any: by SCHEMA
    for row in token_rows(source):
        yield {
            "uid": str(row.member.group_number),  # without "_", at which verl cuts a key
            "session_id": row.member.place,
            "index": row.place,
            "prompt_ids": row.prompt_ids,
            "response_ids": row.response_ids,
            "response_mask": row.loss_mask,
            "response_logprobs": row.logprobs,
            "reward_score": row.member.reward,
            "num_turns": 2 * row.calls,  # verl counts what is said to the model and what it answers
            "min_global_steps": min(row.version_numbers, default=None),
            "max_global_steps": max(row.version_numbers, default=None),
            "group_id": row.member.group,
            "run_id": row.member.session[0],
            "session_name": row.member.session[1],
            "trajectory_id": row.trajectory_id,
        }
