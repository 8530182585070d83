"""Paths, masks and owners, by hand-written values; by properties in test_properties.py."""

import time

import numpy as np
import pyarrow as pa
import pytest

from polar_toolkit import trajectories
from polar_toolkit.tree import grow


def build(book, order=None):
    return trajectories.build(grow(book.calls(order)))


def shown(built):
    return [(t.input_ids.tolist(), t.loss_mask.tolist()) for t in built]


def test_a_linear_session_is_one_trajectory(book):
    """Every sampled token stands once, with its logprob, version and temperature; context carries none."""
    book.call("a", [1, 2], [3], logprob=-0.25, temperature=0.5, versions=[{"start": 0, "end": 1, "version": "v0"}])
    book.call("b", [1, 2, 3, 4], [5, 6], parent="a", versions=[{"start": 0, "end": 2, "version": "v1"}])
    (path,) = build(book)
    assert path.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert path.loss_mask.tolist() == [0, 0, 1, 0, 1, 1]
    assert path.logprobs.tolist() == [0, 0, -0.25, 0, -0.5, -0.5]
    assert path.temperature.tolist() == [1, 1, 0.5, 1, 1, 1]
    assert [path.version_names[code] for code in path.versions] == ["", "", "v0", "", "v1", "v1"]
    assert (path.trajectory_id, path.call_ids, path.edges) == ("b.0", ("a", "b"), ("root(first)", "exact"))
    assert path.call_starts == (2, 4)
    assert path.input_ids.dtype == np.int32
    assert path.loss_mask.dtype == np.uint8
    assert path.logprobs.dtype == np.float32


def test_tokens_that_two_leaves_share_are_trained_on_the_first(book):
    """Two leaves with two common turns: the common tokens have one place with loss."""
    book.call("a", [1], [2, 3])
    book.call("b", [1, 2, 3, 4], [5], parent="a")
    book.call("c", [1, 2, 3, 6], [7], parent="a")
    assert shown(build(book)) == [
        ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]),
        ([1, 2, 3, 6, 7], [0, 0, 0, 0, 1]),
    ]


def test_the_tail_that_a_child_left_is_trained_on_the_parents_own_leaf(book):
    """inside(1): the parent's path keeps its whole output, the child takes over the rest as context."""
    book.call("a", [1], [2, 3, 4])
    book.call("b", [1, 2, 3, 9], [5], parent="a")
    assert shown(build(book)) == [
        ([1, 2, 3, 4], [0, 1, 1, 1]),
        ([1, 2, 3, 9, 5], [0, 0, 0, 0, 1]),
    ]


def test_a_child_inside_may_own_the_part_that_it_takes(book):
    """When the path through the whole output ends later, it owns only the tail."""
    book.call("a", [1], [2, 3, 4])
    book.call("b", [1, 2, 9], [5], parent="a")
    book.call("c", [1, 2, 3, 4, 6], [7], parent="a")
    assert shown(build(book)) == [
        ([1, 2, 9, 5], [0, 1, 0, 1]),
        ([1, 2, 3, 4, 6, 7], [0, 0, 1, 1, 0, 1]),
    ]


def test_what_follows_a_break_is_a_trajectory_of_its_own(book):
    """A suffix after an edited history is kept, not dropped."""
    book.call("a", [1, 2], [3])
    book.call("b", [1, 2, 3, 4], [5], parent="a")
    book.call("c", [1, 9], [6], root_reason="edited_history")
    book.call("d", [1, 9, 6, 7], [8], parent="c")
    assert shown(build(book)) == [
        ([1, 2, 3, 4, 5], [0, 0, 1, 0, 1]),
        ([1, 9, 6, 7, 8], [0, 0, 1, 0, 1]),
    ]


def test_a_retrys_orphan_leaves_no_trace(book):
    """The superseded answer is neither trained nor context."""
    book.call("orphan", [1, 2], [3, 3])
    book.call("used", [1, 2], [4])
    book.call("next", [1, 2, 4, 5], [6], parent="used")
    assert shown(build(book)) == [([1, 2, 4, 5, 6], [0, 0, 1, 0, 1])]


def test_an_untrainable_turn_is_context_for_the_ones_behind_it(book):
    """Tokens of a greedy turn are not on the mask, later turns are."""
    book.call("a", [1, 2], [3], trainable=False, untrainable_reason="greedy")
    book.call("b", [1, 2, 3, 4], [5], parent="a")
    assert shown(build(book)) == [([1, 2, 3, 4, 5], [0, 0, 0, 0, 1])]


def test_a_path_ends_at_its_last_trainable_call(book):
    """An aborted end adds neither tokens nor a trajectory."""
    book.call("a", [1, 2], [3])
    book.call("b", [1, 2, 3, 4], [5], parent="a", status="aborted")
    assert shown(build(book)) == [([1, 2, 3], [0, 0, 1])]


def test_an_added_end_of_turn_is_context(book):
    """After an ending by length, the end-of-turn that the next prompt adds was not sampled."""
    book.call("a", [1], [2, 3], finish="length")
    book.call("b", [1, 2, 3, 50, 4], [5, 50], parent="a", finish="stop")
    assert shown(build(book)) == [([1, 2, 3, 50, 4, 5, 50], [0, 1, 1, 0, 0, 1, 1])]


def test_four_interleaved_agents_are_four_trajectories(book):
    """Four agents of 25 turns: every sampled token once."""
    last, prompts = {}, {agent: [100 + agent] for agent in range(4)}
    for turn in range(25):
        for agent in range(4):
            last[agent] = book.call(f"{agent}-{turn}", prompts[agent], [turn, agent], parent=last.get(agent))
            prompts[agent] = [*prompts[agent], turn, agent, 7]
    built = build(book)
    assert len(built) == 4
    assert [int(t.loss_mask.sum()) for t in built] == [50] * 4


def test_spans_of_two_versions_are_put_on_their_tokens(book):
    """A weight update in the middle of a call splits it."""
    spans = [{"start": 0, "end": 1, "version": "v0"}, {"start": 1, "end": 3, "version": "v1"}]
    book.call("a", [1], [2, 3, 4], versions=spans)
    table = trajectories.to_table(build(book), {})
    assert table["versions"].to_pylist() == [["", "v0", "v1", "v1"]]


def test_a_table_has_the_declared_columns_and_the_sessions_reward(book):
    """Trajectories become rows; a session without a reward has null."""
    book.call("a", [1], [2])
    built = build(book)
    assert trajectories.to_table(built, {}).to_pylist()[0]["reward"] is None
    table = trajectories.to_table(built, {("run", "s"): 0.5})
    assert table.schema == trajectories.SCHEMA
    assert table.to_pylist() == [
        {
            "schema_version": 2, "trajectory_id": "a.0", "run_id": "run", "session_id": "s", "group_id": None,
            "kind": "agent", "input_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -0.5],
            "versions": ["", "v0"], "temperature": [1.0, 1.0], "call_ids": ["a"], "call_starts": [1],
            "edges": ["root(first)"], "reward": 0.5,
        }
    ]  # fmt: skip


def test_no_trajectory_is_an_empty_table():
    """Nothing to train is not an error here."""
    assert trajectories.to_table([], {}).equals(pa.table(trajectories.SCHEMA.empty_table()))


def test_a_chain_of_5000_turns_is_one_trajectory_within_seconds(book):
    """Linear time, and no recursion."""
    book.chain(5000)
    calls = book.calls()
    started = time.monotonic()
    (path,) = trajectories.build(grow(calls))
    took = time.monotonic() - started
    assert (len(path.input_ids), int(path.loss_mask.sum())) == (150_000, 50_000)
    assert took < 5, f"{took:.1f} s"


def test_tokens_that_have_no_place_are_an_error(book):
    """The invariant is checked at the end of every build."""
    book.call("a", [1], [2])
    forest = grow(book.calls())
    with pytest.raises(RuntimeError, match="trainable"):
        trajectories.build(type(forest)(forest.session, None, (*forest.nodes, _unreachable(forest.nodes[0]))))


def _unreachable(node):
    """A trainable node that is its own child, so that no path ends at it."""
    return type(node)(node.call, 1, 0, node.suffix, "exact", "pointer", reason=None, intact=True)


def test_what_was_sampled_behind_a_stop_string_is_on_no_path(book):
    """The next prompt goes on from the kept tokens, exactly; those behind them are not trained."""
    book.call("a", [1, 2], [3, 4, 5, 6], kept_len=2)
    book.call("b", [1, 2, 3, 4, 9, 9], [7], parent="a")
    (path,) = build(book)
    assert path.input_ids.tolist() == [1, 2, 3, 4, 9, 9, 7]
    assert path.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert path.edges == ("root(first)", "exact")


def test_a_reply_that_a_stop_string_cut_ends_where_it_was_kept(book):
    """Also when nothing continues it; and one that was cut at once has nothing to train."""
    book.call("a", [1, 2], [3, 4, 5], kept_len=2)
    book.call("b", [8], [9], kept_len=0)
    assert shown(build(book)) == [([1, 2, 3, 4], [0, 0, 1, 1])]
