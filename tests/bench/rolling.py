"""A whole rollout in the tests' own process: the real runner, a real mitmdump, real sandboxes.

Invariant: what is not given by the test is what the command line would take. It judges nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_toolkit.rewards import read as read_rewards
from polar_toolkit.rollout import recipe
from polar_toolkit.rollout.board import Board
from polar_toolkit.rollout.interceptor import Interceptor
from polar_toolkit.rollout.options import Options, attempts
from polar_toolkit.rollout.outcome import Outcome
from polar_toolkit.rollout.runner import Runner
from polar_toolkit.rollout.sandbox import sandboxes
from polar_toolkit.rollout.task import Task

Meanwhile = Callable[[Interceptor], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Rolled:
    """What a rollout left."""

    run: Path
    rows: Mapping[str, Outcome]
    """By attempt."""
    rewards: Mapping[str, float]
    """By session."""


async def rolled(asked: Options, tasks: Sequence[Task], meanwhile: Meanwhile | None = None) -> Rolled:
    """Run all attempts; `meanwhile` is done beside it, and is given the interceptor."""
    asked.run.mkdir(mode=0o700, exist_ok=True)
    interceptor = Interceptor(asked.run, asked.settings(), listen_host=asked.listen_host)
    runner = Runner(
        asked,
        tasks,
        recipe=recipe.find(asked.harness),
        sandboxes=sandboxes(asked.sandbox, asked.run, run_id_of(asked)),
        interceptor=interceptor,
        board=Board(attempts(asked, list(tasks))),
    )
    running = asyncio.create_task(runner.run())
    if meanwhile:
        await meanwhile(interceptor)
    return Rolled(asked.run, {row.attempt_id: row for row in await running}, read_rewards(asked.run))


def run_id_of(asked: Options) -> str:
    """Marks the sandboxes of this rollout."""
    return f"{os.getpid()}-{asked.run.parent.name}"
