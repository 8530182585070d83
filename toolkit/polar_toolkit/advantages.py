"""Group-relative advantages (GRPO): each session against the sessions of its group.

Invariant: a session counts once in its group, however many trajectories it has. Pure numpy; no tokens here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polar_toolkit.calls import SessionKey

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


def grpo(rewards_G: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rewards of one group, shape (G,), to advantages (reward - mean) / population std; zeros for a flat group."""
    std = float(rewards_G.std())
    return np.zeros_like(rewards_G) if std <= ZERO_STD else (rewards_G - rewards_G.mean()) / std


def of_sessions(
    rewards: Mapping[SessionKey, float], group_ids: Mapping[SessionKey, str | None]
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
        advantages.update(zip(sessions, grpo(rewards_G).tolist(), strict=True))
        groups.append(Group(group_id, tuple(sessions), float(rewards_G.mean()), float(rewards_G.std())))
    return advantages, groups
