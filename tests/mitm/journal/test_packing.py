"""Rows as bytes, and as a table again."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.journal.packing import pack, to_table
from polar_mitm.rows import SCHEMA


def one_row(row: dict[str, Any]) -> pa.Table:
    return to_table([pack(row)])


def test_a_row_becomes_a_table_of_the_schema() -> None:
    """Every value has its declared type; what is absent is null."""
    spans = [{"start": 0, "end": 2, "version": "v1"}]
    ids = np.array([1, 2], np.int32)
    calls = one_row({"prompt_suffix": ids, "versions": spans, "trainable": True, "fidelity": ["store"]})
    assert calls.schema.equals(SCHEMA)
    (row,) = calls.to_pylist()
    assert row["prompt_suffix"] == [1, 2]
    assert row["versions"] == spans
    assert row["fidelity"] == ["store"]
    assert row["error"] is None


def test_an_empty_list_is_not_null() -> None:
    """A call that sampled nothing has an empty output, not an unknown one."""
    (row,) = one_row({"output_ids": []}).to_pylist()
    assert row["output_ids"] == []
    assert row["logprobs"] is None


def test_logprobs_keep_their_bits() -> None:
    """float32 in, the same float32 out."""
    logprobs = -np.random.default_rng(0).exponential(1, 100).astype(np.float32)
    column = one_row({"logprobs": logprobs})["logprobs"]
    assert np.array_equal(column[0].values.to_numpy(), logprobs)


def test_an_unknown_column_is_refused() -> None:
    """A mistyped name would be a lost value."""
    with pytest.raises(KeyError, match="promt_len"):
        pack({"promt_len": 3})


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("call_id", b"bytes"), ("error", "half \ud800"), ("stream", 1), ("sequence", "1"), ("cached_tokens", 1 << 31),
        ("temperature", "hot"), ("history_key", b"too short"), ("output_ids", np.array([1.5])),
        ("output_ids", [1 << 31]), ("fidelity", [None]), ("versions", [{"start": 0, "end": 1, "version": 7}]),
    ],
)  # fmt: skip
def test_a_value_that_its_column_cannot_hold_is_refused(column: str, value: Any) -> None:
    """When it is packed, where only its own call suffers."""
    with pytest.raises((TypeError, ValueError, OverflowError)):
        pack({column: value})


_NUMBERS = st.booleans() | st.integers() | st.floats(width=32)
_SCALARS = _NUMBERS | st.text() | st.text(st.characters()) | st.binary(max_size=17)
_VALUES = _SCALARS | st.lists(_SCALARS, max_size=3)


@given(st.dictionaries(st.sampled_from(SCHEMA.names), _VALUES, max_size=5))
def test_whatever_is_packed_can_be_put_into_a_table(row: dict[str, Any]) -> None:
    """And nothing else is: no row holds up the sealing of another."""
    try:
        packed = pack(row)
    except (TypeError, ValueError, OverflowError):
        return
    assert len(to_table([packed])) == 1
