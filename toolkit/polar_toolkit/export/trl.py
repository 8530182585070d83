"""TRL 1.16: the fields of an async `RolloutSample`, beside the lists that a `rollout_func` returns.

Invariant: a row is one trajectory, with the advantage of its session against its group; the columns of the whole
sequence (input_ids, completion_mask, old_log_probs) and those of its two halves say the same. Messages are not written:
TRL trains on tokens, and shows messages only in its logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from polar_toolkit.export.files import write_table
from polar_toolkit.export.source import Format, Source
from polar_toolkit.export.token_rows import token_rows

SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("completion_mask", pa.list_(pa.uint8())),
        pa.field("old_log_probs", pa.list_(pa.float32())),
        pa.field("advantage", pa.float64()),
        pa.field("model_version", pa.int32()),
        pa.field("group_id", pa.int32()),
        pa.field("rollout_id", pa.int32()),
        pa.field("prompt_ids", pa.list_(pa.int32())),
        pa.field("completion_ids", pa.list_(pa.int32())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("env_mask", pa.list_(pa.uint8())),
        pa.field("reward", pa.float64()),
    ]
)


def write(folder: Path, source: Source) -> None:
    """Write rollout_samples.parquet."""
    write_table(folder / "rollout_samples.parquet", SCHEMA, _rows(source))


FORMAT = Format("trl", "RolloutSample fields and rollout_func lists in Parquet", write)


def _rows(source: Source) -> Iterator[dict[str, Any]]:  # Any: by SCHEMA
    for row in token_rows(source):
        before = np.zeros(len(row.prompt_ids), np.uint8)
        yield {
            "input_ids": row.ids,
            "completion_mask": np.concatenate([before, row.loss_mask]),
            "old_log_probs": np.concatenate([before, row.logprobs], dtype=np.float32),
            "advantage": row.member.advantage,
            "model_version": min(row.version_numbers, default=0),
            "group_id": row.member.group_number,
            "rollout_id": row.member.number,
            "prompt_ids": row.prompt_ids,
            "completion_ids": row.response_ids,
            "logprobs": row.logprobs,
            "env_mask": row.loss_mask,
            "reward": row.member.reward,
        }
