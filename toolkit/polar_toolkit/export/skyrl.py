"""SkyRL 0.3 and 0.4: the parallel lists of a step-wise `GeneratorOutput` as the columns of one Parquet file.

Invariant: the rows of a session stand together, the last one has `is_last_step` and the reward, and `trajectory_ids`
name the group and the session's place in it. Keys that are lists of tokens or numbers are columns; the keys that are
None here are added by the loader (docs/export.md).
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
        pa.field("prompt_token_ids", pa.list_(pa.int32())),
        pa.field("response_ids", pa.list_(pa.int32())),
        pa.field("rewards", pa.float64()),
        pa.field("loss_masks", pa.list_(pa.uint8())),
        pa.field("stop_reasons", pa.string()),
        pa.field("rollout_logprobs", pa.list_(pa.float32())),
        pa.field("trajectory_ids", pa.struct([("instance_id", pa.string()), ("repetition_id", pa.int32())])),
        pa.field("is_last_step", pa.bool_()),
    ]
)


def write(folder: Path, source: Source) -> None:
    """Write generator_output.parquet."""
    write_table(folder / "generator_output.parquet", SCHEMA, _rows(source))


FORMAT = Format("skyrl", "the lists of a step-wise GeneratorOutput as Parquet columns", write)


def _rows(source: Source) -> Iterator[dict[str, Any]]:  # Any: by SCHEMA
    for row in token_rows(source):
        yield {
            "prompt_token_ids": row.prompt_ids,
            "response_ids": row.response_ids,
            "rewards": row.member.reward if row.last else 0.0,
            "loss_masks": row.loss_mask,
            "stop_reasons": "length" if row.truncated else "stop",
            "rollout_logprobs": row.logprobs,
            "trajectory_ids": {"instance_id": row.member.group, "repetition_id": row.member.place},
            "is_last_step": row.last,
        }
