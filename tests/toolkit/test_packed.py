"""Packed rows, once by hand and otherwise by properties."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_toolkit import batches, packed
from polar_toolkit.batches import Options
from tests.toolkit.packing import packed_rows, pieces


def test_a_batch_computed_by_hand(book):
    """Two sessions of a group, rewards 1 and 0: advantages +1 and -1, four tokens of weight 1/4."""
    book.call("a", [1, 2], [3, 4], session_id="good", group_id="g", logprob=-0.25)
    book.call("b", [1], [5, 6], session_id="bad", group_id="g", temperature=0.5)
    (row,) = packed_rows(book, {"good": 1.0, "bad": 0.0}, Options())
    assert row == {
        "schema_version": 1,
        "input_ids": [1, 5, 6, 1, 2, 3, 4],
        "position_ids": [0, 1, 2, 0, 1, 2, 3],
        "loss_mask": [0, 1, 1, 0, 0, 1, 1],
        "old_logprobs": [0, -0.5, -0.5, 0, 0, -0.25, -0.25],
        "advantages": [0, -1, -1, 0, 0, 1, 1],
        "versions": ["", "v0", "v0", "", "", "v0", "v0"],
        "temperature": [1, 0.5, 0.5, 1, 1, 1, 1],
        "loss_weight": [0, 0.25, 0.25, 0, 0, 0.25, 0.25],
        "session_ids": ["bad", "good"],
        "group_ids": ["g", "g"],
        "trajectory_ids": ["b.0", "a.0"],
        "lengths": [3, 4],
    }


def test_a_trajectory_that_is_too_long_keeps_its_beginning(book):
    """An exact causal prefix."""
    book.call("a", [1, 2], [3, 4, 5], session_id="a")
    (row,) = packed_rows(book, {"a": 1.0}, Options(max_tokens=4))
    assert (row["input_ids"], row["loss_mask"], row["lengths"]) == ([1, 2, 3, 4], [0, 0, 1, 1], [4])
    assert sum(row["loss_weight"]) == 1


@pytest.mark.parametrize("window", [1, packed.WINDOW_TOKENS])
@pytest.mark.parametrize("weighting", ["token", "session", "constant"])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=12))
def test_rows_are_whole_and_weights_add_up_to_what_the_batch_says(new_book, weighting, window, sizes):
    """In one window or in many: no row is over the limit, and every trajectory is in one row."""
    book = new_book()
    for i, (prompt, output, session) in enumerate(sizes):
        book.call(f"c{i}", [i] * prompt, [i] * output, session_id=f"s{session}", group_id="g", thread_id=f"t{i}")
    options = Options(max_tokens=16, weighting=weighting)
    seen = batches.survey(pieces(book, {f"s{k}": float(k) for k in range(3)}), options.max_tokens)
    (batch,) = batches.plan(seen, options).batches
    rows = [row for table in packed.tables(seen, batch, 16, window_tokens=window) for row in table.to_pylist()]
    assert all(len(row["input_ids"]) == sum(row["lengths"]) <= 16 for row in rows)
    assert sorted(t for row in rows for t in row["trajectory_ids"]) == sorted(f"c{i}.0" for i in range(len(sizes)))
    assert np.isclose(sum(sum(row["loss_weight"]) for row in rows), batch.weight_sum, rtol=1e-5)
    assert batch.trained == sum(sum(row["loss_mask"]) for row in rows) == sum(size[1] for size in sizes)
    for row in rows:
        starts = np.cumsum([0, *row["lengths"]])[:-1]
        assert [row["position_ids"][start] for start in starts] == [0] * len(starts)
        off = np.array(row["loss_mask"]) == 0
        assert not np.array(row["loss_weight"])[off].any()
        assert not np.array(row["advantages"])[off].any()
