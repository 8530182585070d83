"""A run of long sessions on disk, as an interceptor leaves it: sealed Parquet files of calls in parent + suffix form.

Invariant: the rows are whole (lengths, shared prefixes and prompt hashes agree), so that merging does all of its work
on them; the same arguments give the same tokens. It writes no request bodies: merging does not read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from polar_mitm.journal.frames import stamped_schema
from polar_mitm.rows import SCHEMA, SCHEMA_VERSION

FIRST = 8_000
"""Tokens of a session's first prompt."""
OBSERVED, SAMPLED = 500, 250
"""Tokens that each turn adds to the prompt, and that it samples."""
TOGETHER = 16
"""Sessions whose turns take turns."""
FILE_CALLS, GROUP_CALLS = 5_000, 1_250
"""Calls in a sealed file and in one of its row groups: the writer seals some 16 MB of packed rows as one group."""
GROUP_SESSIONS = 8
VOCABULARY = 150_000


def write_run(folder: Path, *, sessions: int, turns: int, seed: int = 0) -> Path:
    """Make a run folder of `sessions` sessions of `turns` turns each, and give each a reward. Returns `folder`."""
    (folder / "calls").mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "run.json").write_text(json.dumps({"run_id": folder.name}))
    rng = np.random.default_rng(seed)
    calls = _calls(folder.name, sessions, turns, rng)
    for number, rows in enumerate(batched(calls, FILE_CALLS), start=1):
        with pq.ParquetWriter(_part(folder, number), stamped_schema(), compression="zstd") as writer:
            for group in batched(rows, GROUP_CALLS):
                writer.write_table(_table(group))
    rewards = rng.integers(0, 2, sessions).tolist()
    lines = (json.dumps({"session_id": f"s{i:05d}", "reward": reward}) + "\n" for i, reward in enumerate(rewards))
    (folder / "rewards.jsonl").write_text("".join(lines))
    return folder


def _part(folder: Path, number: int) -> Path:
    return folder / "calls" / f"20260101T000000.000000Z-bench-1-00000000-{number:06d}.parquet"


@dataclass
class _Session:
    """Where a session stands: the hash of its path so far, and its length."""

    index: int
    state: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    length: int = 0


def _calls(run_id: str, sessions: int, turns: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    sequence = 0
    for indices in batched(range(sessions), TOGETHER):
        opened = [_Session(index) for index in indices]
        for turn in range(turns):
            for session in opened:
                yield {"run_id": run_id, "sequence": sequence, **_call(session, turn, rng)}
                sequence += 1


def _call(session: _Session, turn: int, rng: np.random.Generator) -> dict[str, Any]:
    """The next call of a session, which moves on."""
    suffix = rng.integers(0, VOCABULARY, OBSERVED if turn else FIRST, dtype=np.int32)
    output = rng.integers(0, VOCABULARY, SAMPLED, dtype=np.int32)
    shared = session.length
    session.state.update(suffix.data)
    digest = session.state.digest()
    session.state.update(output.data)
    session.length += len(suffix) + len(output)
    name = f"c{session.index:05d}x"
    return {
        "call_id": f"{name}{turn:06d}",
        "session_id": f"s{session.index:05d}",
        "group_id": f"g{session.index // GROUP_SESSIONS:05d}",
        "parent_call_id": f"{name}{turn - 1:06d}" if turn else None,
        "parent_choice": 0 if turn else None,
        "parent_evidence": "pointer" if turn else None,
        "root_reason": None if turn else "first",
        "prompt_len": shared + len(suffix),
        "prompt_shared": shared,
        "prompt_suffix": suffix,
        "prompt_hash": digest,
        "output_ids": output,
        "logprobs": -rng.random(SAMPLED, dtype=np.float32) * 3,
        "versions": [{"start": 0, "end": SAMPLED, "version": f"v{turn // 50}"}],
    }


_EVERY_CALL: dict[str, Any] = {
    "schema_version": SCHEMA_VERSION, "writer": "20260101T000000.000000Z-bench-1-00000000", "choice": 0,
    "kind": "agent", "status": "completed", "temperature": 1.0, "trainable": True, "client_delivered": True,
}  # fmt: skip


def _table(rows: tuple[dict[str, Any], ...]) -> pa.Table:
    columns = [_column([row.get(one.name, _EVERY_CALL.get(one.name)) for row in rows], one.type) for one in SCHEMA]
    return pa.table(columns, schema=stamped_schema())


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not isinstance(values[0], np.ndarray):
        return pa.array(values, kind)
    offsets = np.cumsum([0, *map(len, values)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.concatenate(values), kind.value_type))
