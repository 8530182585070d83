"""Group-relative advantages."""

import numpy as np
import pytest

from polar_toolkit.advantages import ADVANTAGES, dr_grpo, grpo, of_sessions, rloo


def test_advantages_are_deviations_in_units_of_the_population_std():
    """Rewards 1, 1, 0, 0: mean 0.5, std 0.5."""
    assert grpo(np.array([1.0, 1.0, 0.0, 0.0])).tolist() == [1, 1, -1, -1]


def test_a_computed_example():
    """Rewards 3, 1, 2: mean 2, std sqrt(2/3)."""
    assert np.allclose(grpo(np.array([3.0, 1.0, 2.0])), np.array([1, -1, 0]) / np.sqrt(2 / 3))


def test_leave_one_out_compares_with_the_mean_of_the_others():
    """Rewards 3, 1, 2: the others' means are 1.5, 2.5 and 2."""
    assert np.allclose(rloo(np.array([3.0, 1.0, 2.0])), [1.5, -1.5, 0])


def test_dr_grpo_divides_by_no_deviation():
    """Rewards 3, 1, 2: mean 2."""
    assert dr_grpo(np.array([3.0, 1.0, 2.0])).tolist() == [1, -1, 0]


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_equal_rewards_give_zero(advantage):
    """Rounding in rewards is not a signal."""
    rewards = {("r", "a"): 0.3, ("r", "b"): 0.1 + 0.2}
    advantages, _ = of_sessions(rewards, dict.fromkeys(rewards, "g"), advantage)
    assert set(advantages.values()) == {0.0}


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_single_session_has_no_advantage(advantage):
    """It has no others, whichever way they would be used."""
    assert of_sessions({("r", "a"): 1.0}, {("r", "a"): "g"}, advantage)[0] == {("r", "a"): 0.0}


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_advantages_of_a_group_add_up_to_zero(advantage):
    """Every baseline is over the group's own sessions."""
    rewards_G = np.array([1.0, 0.0, 0.0, 0.5])
    assert np.isclose(ADVANTAGES[advantage](rewards_G).sum(), 0)


def test_a_session_is_compared_with_its_own_group():
    """Groups do not mix, and span runs."""
    rewards = {("r", "a"): 1.0, ("q", "b"): 0.0, ("r", "c"): 5.0, ("r", "d"): 7.0}
    groups = {("r", "a"): "x", ("q", "b"): "x", ("r", "c"): "y", ("r", "d"): "y"}
    advantages, found = of_sessions(rewards, groups)
    assert advantages == {("r", "a"): 1, ("q", "b"): -1, ("r", "c"): -1, ("r", "d"): 1}
    assert [(g.group_id, len(g.sessions), g.mean, g.std, g.flat) for g in found] == [
        ("x", 2, 0.5, 0.5, False),
        ("y", 2, 6.0, 1.0, False),
    ]


def test_a_session_without_a_group_is_its_own_flat_group():
    """There is nothing to compare it with."""
    advantages, (group,) = of_sessions({("r", "a"): 1.0}, {("r", "a"): None})
    assert advantages == {("r", "a"): 0.0}
    assert (group.group_id, group.flat) == ("r/a", True)
