"""Which trajectories are in which batch, with which advantages and weights, and what is left out."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar_toolkit.batches import Options
from tests.toolkit.packing import packed_rows, planned


def weights_of(plan):
    """Weight of a trained token by trajectory's place, of the only batch."""
    (batch,) = plan.batches
    return batch.weights.tolist()


def test_baselines_are_over_sessions_not_over_rows(book):
    """Rewards 1, 1, 1, 0 where three rows are one session: the advantages come from 1 and 0."""
    for i in range(3):
        book.call(f"a{i}", [i], [7], session_id="good", group_id="g")
    book.call("b", [9], [7], session_id="bad", group_id="g")
    (batch,) = planned(book, {"good": 1.0, "bad": 0.0}, Options()).batches
    assert sorted(batch.advantages.tolist()) == [-1, 1, 1, 1]
    assert (batch.groups[0].mean, batch.groups[0].std) == (0.5, 0.5)


def test_session_weighting_counts_a_session_once(book):
    """A session with three tokens and one with a single token have half the weight each."""
    book.call("a", [1], [2, 3, 4], session_id="long", group_id="g")
    book.call("b", [1], [2], session_id="short", group_id="g")
    plan = planned(book, {"long": 1.0, "short": 0.0}, Options(weighting="session"))
    assert np.allclose(weights_of(plan), [1 / 6, 1 / 2])
    assert np.isclose(plan.batches[0].weight_sum, 1)


def test_constant_weighting_divides_by_the_longest_row_and_the_sessions(book):
    """Two sessions of at most 100 tokens: every token weighs 1/200, and four tokens 4/200."""
    book.call("a", [1], [2, 3, 4], session_id="long", group_id="g")
    book.call("b", [1], [2], session_id="short", group_id="g")
    plan = planned(book, {"long": 1.0, "short": 0.0}, Options(max_tokens=100, weighting="constant"))
    assert weights_of(plan) == [1 / 200, 1 / 200]
    assert np.isclose(plan.batches[0].weight_sum, 4 / 200)


def test_a_session_without_a_reward_is_left_out_and_counted(book):
    """Its tokens are listed under no_reward."""
    book.call("a", [1], [2], session_id="a", group_id="g")
    book.call("b", [1], [2, 3], session_id="b", group_id="g")
    plan = planned(book, {"a": 1.0}, Options())
    assert plan.left_out == {"no_reward": 2}
    assert [batch.trained for batch in plan.batches] == [1]


def test_a_trajectory_that_is_too_long_keeps_its_beginning(book):
    """Tokens behind the exact causal prefix are listed as truncated, and weigh nothing."""
    book.call("a", [1, 2], [3, 4, 5], session_id="a")
    plan = planned(book, {"a": 1.0}, Options(max_tokens=4))
    assert ([batch.trained for batch in plan.batches], plan.left_out) == ([2], {"truncated": 1})
    assert weights_of(plan) == [0.5]


def test_a_trajectory_whose_tokens_are_all_cut_is_left_out(book):
    """A prompt over the limit leaves nothing to train."""
    book.call("a", [1, 2, 3], [4], session_id="a")
    plan = planned(book, {"a": 1.0}, Options(max_tokens=3))
    assert (plan.batches, plan.left_out) == ((), {"truncated": 1})


def test_a_flat_group_stays_with_advantage_zero_or_is_dropped(book):
    """Equal rewards teach nothing; both are counted."""
    for name in ("a", "b"):
        book.call(name, [1], [2], session_id=name, group_id="g")
    kept = planned(book, {"a": 1.0, "b": 1.0}, Options())
    (batch,) = kept.batches
    assert (batch.trained, batch.flat_tokens, kept.left_out) == (2, 2, {})
    assert batch.advantages.tolist() == [0, 0]
    dropped = planned(book, {"a": 1.0, "b": 1.0}, Options(drop_zero_variance=True))
    assert (dropped.batches, dropped.left_out) == ((), {"zero_variance": 2})


def test_no_rewards_make_no_batch(book):
    """The tokens are counted all the same."""
    book.call("a", [1], [2])
    plan = planned(book, {}, Options())
    assert (plan.batches, plan.groups, plan.left_out) == ((), (), {"no_reward": 1})


def test_a_batch_of_so_many_groups_is_normalised_by_itself(book):
    """Five groups of two sessions in batches of two groups: three batches, each of weight 1."""
    for i in range(10):
        book.call(f"c{i}", [1], [2] * (i + 1), session_id=f"s{i}", group_id=f"g{9 - i // 2}")
    plan = planned(book, {f"s{i}": float(i % 2) for i in range(10)}, Options(groups=2))
    assert [[g.group_id for g in batch.groups] for batch in plan.batches] == [["g9", "g8"], ["g7", "g6"], ["g5"]]
    assert [batch.trained for batch in plan.batches] == [10, 26, 19]
    assert np.allclose([batch.weight_sum for batch in plan.batches], 1)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("groups", [None, 1])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=14),
    limit=st.integers(2, 24),
    rewards=st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=3, max_size=3),
)
def test_no_filter_takes_the_owner_of_a_token_that_another_trajectory_keeps(
    new_book, turns, limit, rewards, groups, drop
):
    """Over branching sessions: a sampled token that stands in some packed row is on the loss mask of exactly one."""
    book = new_book()
    paths = {name: [(f"{name}-0", [1], [2, 3])] for name in "abc"}
    for name, ((call, prompt, output),) in list(paths.items()):
        book.call(call, prompt, output, session_id=name, group_id="g")
    for number, (pick, left, sampled, other) in enumerate(turns):
        name = "abc"[number % 3]
        parent, prompt, output = paths[name][pick % len(paths[name])]
        kept = [*prompt, *output[: max(1, len(output) - left)], 50 + number]
        call = f"{name}-{number + 1}"
        book.call(call, kept, [100 + number] * sampled, parent=parent, session_id=name, group_id="h" if other else "g")
        paths[name].append((call, kept, [100 + number] * sampled))
    scores = {name: reward for name, reward in zip("abc", rewards, strict=True) if reward is not None}
    options = Options(max_tokens=limit, groups=groups, drop_zero_variance=drop)
    sampled_at = {
        (name, *prompt, *output[: at + 1])
        for name, calls in paths.items()
        for _, prompt, output in calls
        for at in range(len(output))
    }
    owners: dict[tuple[object, ...], int] = {}
    for row in packed_rows(book, scores, options):
        start = 0
        for session, length in zip(row["session_ids"], row["lengths"], strict=True):
            ids, mask = row["input_ids"][start : start + length], row["loss_mask"][start : start + length]
            for at in range(length):
                place = (session, *ids[: at + 1])
                if place in sampled_at:
                    owners[place] = owners.get(place, 0) + mask[at]
            start += length
    assert set(owners.values()) <= {1}
