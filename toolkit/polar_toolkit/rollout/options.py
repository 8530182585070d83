"""What a user asks of a rollout, as one value, and what is taken where nothing is asked.

Invariant: everything that decides what an attempt is, and how it is judged, is in this value, and the value can be
written down as JSON; a resumed rollout asks for the same. It checks nothing of the tasks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.outcome import TRAINED, Status
from polar_toolkit.rollout.task import Attempt, Budget, Task


class Keep(StrEnum):
    """Whose workspace stays in the run folder for a look."""

    FAILED = "failed"
    """Of attempts that did not complete."""
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Pools:
    """How many attempts may be in each stage at once."""

    init: int
    ready: int
    """Attempts that are prepared, or being prepared, ahead of the runs."""
    run: int
    post: int


def default_pools(
    *, init: int | None = None, ready: int | None = None, run: int | None = None, post: int | None = None
) -> Pools:
    """The pools that are named, and others that go with them and with this machine's CPUs.

    A harness mostly waits for the model; preparing and judging are work.
    """
    cpus = os.cpu_count() or 1
    init, run = init or max(2, cpus), run or 4 * cpus
    return Pools(init, ready or init + run, run, post or max(2, cpus))


@dataclass(frozen=True, slots=True)
class Overrides:
    """Budgets of all tasks that take the place of their own."""

    init_s: float | None = None
    run_s: float | None = None
    post_s: float | None = None
    turns: int | None = None
    tokens: int | None = None

    def over(self, budget: Budget) -> Budget:
        """A task's budget with these in it."""
        return replace(budget, **{name: value for name, value in asdict(self).items() if value is not None})


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    run: Path
    """The run folder."""
    harness: str
    """A name in harness_images/, or a folder."""
    engine: str
    way: str = ""
    """One of the recipe's; "" for its default."""
    command: str = ""
    """The user's own, for harness `shell`."""
    tokenizer: str = ""
    sampling: str = "{}"
    """JSON, as in the option polar_sampling."""
    samples: int = 8
    """Attempts at each task: the size of a group."""
    sandbox: str = "local"
    pools: Pools = field(default_factory=default_pools)
    budget: Overrides = Overrides()
    enough: int | None = None
    """A group is finished when so many of its attempts have a reward that is trained; the others are cancelled."""
    tries: int = 2
    """At one attempt, when it fails and the fault is not the harness's."""
    rewarded: tuple[Status, ...] = TRAINED
    """Statuses whose rewards are written for training."""
    seed: int = 0
    only: tuple[str, ...] = ()
    """The ids of the tasks to work on, in this order; () for all of the list."""
    shard: tuple[int, int] = (1, 1)
    """Which part of the task list, of how many: whole groups."""
    keep: Keep = Keep.FAILED
    listen_host: str = "127.0.0.1"
    """The interceptor's address; another than loopback lets other machines and containers in."""

    def settings(self) -> dict[str, str]:
        """What the interceptor is started with."""
        tokenizer = {"polar_tokenizer": self.tokenizer} if self.tokenizer else {}
        return {"polar_engine": self.engine, "polar_sampling": self.sampling, **tokenizer}

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Plain values."""
        return {**asdict(self), "run": str(self.run)}


def from_json(row: Mapping[str, Any]) -> Options:  # Any: JSON
    """The inverse of `Options.as_json`."""
    fields: dict[str, Any] = {  # Any: JSON
        **row,
        "run": Path(row["run"]),
        "pools": Pools(**row["pools"]),
        "budget": Overrides(**row["budget"]),
        "rewarded": tuple(map(Status, row["rewarded"])),
        "only": tuple(row["only"]),
        "shard": tuple(row["shard"]),
        "keep": Keep(row["keep"]),
    }
    return Options(**fields)


def chosen(options: Options, tasks: Sequence[Task]) -> list[Task]:
    """The tasks of the list that are asked for by name. Raises Refusal for a name that is not there."""
    named = {task.task_id: task for task in tasks}
    for name in options.only:
        if name not in named:
            raise Refusal(f"--only names {name!r}, which is not in the task list; it begins with {next(iter(named))!r}")
    return [named[name] for name in dict.fromkeys(options.only)] if options.only else list(tasks)


def shard_of(options: Options, tasks: Sequence[Task]) -> list[Task]:
    """The tasks of this runner's part of the list."""
    part, parts = options.shard
    return list(tasks[part - 1 :: parts])


def attempts(options: Options, tasks: Sequence[Task]) -> list[Attempt]:
    """Every attempt, group after group: each sample of each task, with a seed of its own."""
    return [
        Attempt(replace(task, budget=options.budget.over(task.budget)), sample, seed=_seed(options.seed, task, sample))
        for task in tasks
        for sample in range(1, options.samples + 1)
    ]


def _seed(seed: int, task: Task, sample: int) -> int:
    """31 bits, which every program takes; the same whatever shard or order the attempt is worked on in."""
    digest = blake2b(f"{seed}/{task.task_id}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
