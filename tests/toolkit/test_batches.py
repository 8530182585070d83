"""Packing, weights and advantages, once by hand and otherwise by properties."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_toolkit import batches, calls, trajectories
from polar_toolkit.batches import Options
from polar_toolkit.tree import grow


def table_of(book, rewards):
    """The trajectories of a book, with a reward for each named session of run `run`."""
    built = [t for session in calls.by_session(book.calls()).values() for t in trajectories.build(grow(session))]
    return trajectories.to_table(built, {("run", session): reward for session, reward in rewards.items()})


def test_a_batch_computed_by_hand(book):
    """Two sessions of a group, rewards 1 and 0: advantages +1 and -1, four tokens of weight 1/4."""
    book.call("a", [1, 2], [3, 4], session_id="good", group_id="g", logprob=-0.25)
    book.call("b", [1], [5, 6], session_id="bad", group_id="g", temperature=0.5)
    (row,) = batches.build(table_of(book, {"good": 1.0, "bad": 0.0}), Options()).table.to_pylist()
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


def test_baselines_are_over_sessions_not_over_rows(book):
    """Rewards 1, 1, 1, 0 where three rows are one session: the advantages come from 1 and 0."""
    for i in range(3):
        book.call(f"a{i}", [i], [7], session_id="good", group_id="g")
    book.call("b", [9], [7], session_id="bad", group_id="g")
    batch = batches.build(table_of(book, {"good": 1.0, "bad": 0.0}), Options())
    (row,) = batch.table.to_pylist()
    assert sorted(a for a, m in zip(row["advantages"], row["loss_mask"], strict=True) if m) == [-1, 1, 1, 1]
    assert (batch.groups[0].mean, batch.groups[0].std) == (0.5, 0.5)


def test_session_weighting_counts_a_session_once(book):
    """A session with three tokens and one with a single token have half the weight each."""
    book.call("a", [1], [2, 3, 4], session_id="long", group_id="g")
    book.call("b", [1], [2], session_id="short", group_id="g")
    options = Options(weighting="session")
    (row,) = batches.build(table_of(book, {"long": 1.0, "short": 0.0}), options).table.to_pylist()
    assert np.allclose(row["loss_weight"], [0, 1 / 6, 1 / 6, 1 / 6, 0, 1 / 2])


def test_a_session_without_a_reward_is_left_out_and_counted(book):
    """Its tokens are listed under no_reward."""
    book.call("a", [1], [2], session_id="a", group_id="g")
    book.call("b", [1], [2, 3], session_id="b", group_id="g")
    batch = batches.build(table_of(book, {"a": 1.0}), Options())
    assert batch.left_out == {"no_reward": 2}
    assert batch.trained == 1


def test_a_trajectory_that_is_too_long_keeps_its_beginning(book):
    """The exact causal prefix stays; tokens behind it are listed as truncated."""
    book.call("a", [1, 2], [3, 4, 5], session_id="a")
    batch = batches.build(table_of(book, {"a": 1.0}), Options(max_tokens=4))
    (row,) = batch.table.to_pylist()
    assert (row["input_ids"], row["loss_mask"], row["lengths"]) == ([1, 2, 3, 4], [0, 0, 1, 1], [4])
    assert (batch.trained, batch.left_out) == (2, {"truncated": 1})
    assert sum(row["loss_weight"]) == 1


def test_a_trajectory_whose_tokens_are_all_cut_is_left_out(book):
    """A prompt over the limit leaves nothing to train."""
    book.call("a", [1, 2, 3], [4], session_id="a")
    batch = batches.build(table_of(book, {"a": 1.0}), Options(max_tokens=3))
    assert (len(batch.table), batch.trained, batch.left_out) == (0, 0, {"truncated": 1})


def test_a_flat_group_stays_with_advantage_zero_or_is_dropped(book):
    """Equal rewards teach nothing; both are counted."""
    for name in ("a", "b"):
        book.call(name, [1], [2], session_id=name, group_id="g")
    table = table_of(book, {"a": 1.0, "b": 1.0})
    kept = batches.build(table, Options())
    assert (kept.trained, kept.flat_tokens, kept.left_out) == (2, 2, {})
    assert kept.table["advantages"].to_pylist() == [[0, 0, 0, 0]]
    dropped = batches.build(table, Options(drop_zero_variance=True))
    assert (dropped.trained, dropped.flat_tokens, dropped.left_out) == (0, 0, {"zero_variance": 2})


def test_no_rewards_make_an_empty_batch(book):
    """The table still has its columns."""
    book.call("a", [1], [2])
    batch = batches.build(table_of(book, {}), Options())
    assert (batch.table.schema, len(batch.table)) == (batches.SCHEMA, 0)


def test_no_trajectories_make_an_empty_batch():
    """An empty table is fine."""
    assert len(batches.build(trajectories.to_table([], {}), Options()).table) == 0


@pytest.mark.parametrize("weighting", ["token", "session"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=12))
def test_rows_are_whole_and_weights_add_up_to_one(new_book, weighting, sizes):
    """No row is over the limit, every trajectory is in one row, and the weights of the batch sum to 1."""
    book = new_book()
    for i, (prompt, output, session) in enumerate(sizes):
        book.call(f"c{i}", [i] * prompt, [i] * output, session_id=f"s{session}", group_id="g", thread_id=f"t{i}")
    table = table_of(book, {f"s{k}": float(k) for k in range(3)})
    batch = batches.build(table, Options(max_tokens=16, weighting=weighting))
    rows = batch.table.to_pylist()
    assert all(len(row["input_ids"]) == sum(row["lengths"]) <= 16 for row in rows)
    assert sorted(t for row in rows for t in row["trajectory_ids"]) == sorted(table["trajectory_id"].to_pylist())
    assert np.isclose(sum(sum(row["loss_weight"]) for row in rows), 1, atol=1e-5)
    assert batch.trained == sum(sum(row["loss_mask"]) for row in rows) == sum(size[1] for size in sizes)
    for row in rows:
        starts = np.cumsum([0, *row["lengths"]])[:-1]
        assert [row["position_ids"][start] for start in starts] == [0] * len(starts)
        off = np.array(row["loss_mask"]) == 0
        assert not np.array(row["loss_weight"])[off].any()
        assert not np.array(row["advantages"])[off].any()
