"""Group-relative advantages: each session against the sessions of its group, by one of the table ADVANTAGES.

Invariant: a session counts once in its group, however many trajectories it has, and in a group of equal rewards every
advantage is 0. Pure numpy; no tokens here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from polar_toolkit.calls import SessionKey

Rewards_G = npt.NDArray[np.float64]
Advantage = Literal["grpo", "rloo", "dr-grpo"]

ZERO_STD = 1e-6
"""A group whose rewards deviate by no more than this has nothing to teach; its advantages are 0."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rewards of one group."""

    group_id: str
    sessions: tuple[SessionKey, ...]
    mean: float
    std: float
    """Of the population: divided by n."""

    @property
    def flat(self) -> bool:
        """Whether all rewards are equal, so that every advantage is 0."""
        return self.std <= ZERO_STD


def grpo(rewards_G: Rewards_G) -> Rewards_G:
    """(reward - mean) / population std (DeepSeekMath, section 4.1). Not for equal rewards."""
    return (rewards_G - rewards_G.mean()) / rewards_G.std()


def rloo(rewards_G: Rewards_G) -> Rewards_G:
    """Reward - mean of the others' rewards: REINFORCE leave-one-out (Ahmadian et al. 2024). Not for one session."""
    return (rewards_G - rewards_G.mean()) * len(rewards_G) / (len(rewards_G) - 1)


def dr_grpo(rewards_G: Rewards_G) -> Rewards_G:
    """Reward - mean: nothing is blown up by the small std of an easy or hard group (Liu et al. 2025, section 3.2)."""
    return rewards_G - rewards_G.mean()


ADVANTAGES: dict[Advantage, Callable[[Rewards_G], Rewards_G]] = {"grpo": grpo, "rloo": rloo, "dr-grpo": dr_grpo}
"""Each takes the rewards of one group, shape (G,), that are not all equal."""


def of_sessions(
    rewards: Mapping[SessionKey, float], group_ids: Mapping[SessionKey, str | None], advantage: Advantage = "grpo"
) -> tuple[dict[SessionKey, float], list[Group]]:
    """The advantage of each rewarded session, and its groups sorted by name.

    Groups span runs that are merged together. A session without a group is a group of its own, so flat.
    """
    members: dict[str, list[SessionKey]] = {}
    for session in sorted(rewards):
        own = f"{session[0]}/{session[1]}"
        members.setdefault(group_ids[session] or own, []).append(session)
    advantages: dict[SessionKey, float] = {}
    groups: list[Group] = []
    for group_id, sessions in sorted(members.items()):
        rewards_G = np.array([rewards[session] for session in sessions], np.float64)
        group = Group(group_id, tuple(sessions), float(rewards_G.mean()), float(rewards_G.std()))
        advantages_G = np.zeros_like(rewards_G) if group.flat else ADVANTAGES[advantage](rewards_G)
        advantages.update(zip(sessions, advantages_G.tolist(), strict=True))
        groups.append(group)
    return advantages, groups
