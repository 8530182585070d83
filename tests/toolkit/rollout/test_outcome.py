"""One row an attempt: what is written is what is read, and nothing is half written."""

from __future__ import annotations

import json
from dataclasses import fields

import pyarrow.parquet as pq

from polar_toolkit.rollout.outcome import FILE, SCHEMA, Outcome, Status, from_json, write

ROW = Outcome(
    "a.2", "a.2.try2", "a", "a", 2, 2, 7, Status.TIMEOUT, "late", 0.5, {"f2p": 1.0}, trained=True, run_s=1.5,
    artifacts={"patch": "rollout/attempts/a.2/patch.diff"}, metadata={"repo": "x", "tags": [1]},
)  # fmt: skip


def test_a_row_survives_json():
    """The events are the state of a rollout: what is read from them is what was written."""
    assert from_json(json.loads(json.dumps(ROW.as_json()))) == ROW


def test_every_field_has_a_column_in_the_same_order():
    """The schema is declared once, and leaves nothing out."""
    assert [field.name for field in fields(Outcome)] == SCHEMA.names


def test_rows_are_written_in_the_order_of_their_attempts(tmp_path):
    """Whatever order they ended in; an earlier file is replaced, and no other is left beside it."""
    first = Outcome("a.1", "a.1", "a", "a", 1, 1, 7, Status.CANCELLED)
    write(tmp_path, [ROW])
    write(tmp_path, [ROW, first])
    rows = pq.read_table(tmp_path / FILE).to_pylist()
    assert [(row["attempt_id"], row["status"], row["reward"]) for row in rows] == [
        ("a.1", "cancelled", None),
        ("a.2", "timeout", 0.5),
    ]
    assert json.loads(rows[1]["metadata"]) == {"repo": "x", "tags": [1]}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
