"""The asynchronous loop: rollouts and training side by side, in one process that can be killed at any moment.

Invariant: a round of rollouts begins only when all but [lag] max rounds before the one before it are learned from, so
that no token is older than the bound when it is trained on; with max = 0 the two alternate. All that is known is on the
disk: a loop that starts again goes on with the rollout, the merge or the update that was cut off. How a round is made
is told in rounds.py, how it is learned from in training.py.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from polar_train import rounds
from polar_train.commands import Stopped, run_all
from polar_train.config import Config
from polar_train.errors import BadInput
from polar_train.lifetime import alone
from polar_train.metrics import Record
from polar_train.rounds import Rounds
from polar_train.training import Trainer

PATIENCE_S = 60.0
"""For what a killed loop started to clean up and end."""
AHEAD = 1
"""Rounds that may be begun early where no bound on lag is given: one runs while another is learned from."""


def run(
    config: Config,
    *,
    seen: Callable[[Record], None],
    advance: Callable[[int, int], None],
    say: Callable[[str], None],
    stop: threading.Event | None = None,
) -> int:
    """Rolls out and learns until `updates` steps are made or `stop` is set; gives the steps that are made.

    What is called when is as in `training.run`. Raises BadInput for what cannot be used, CommandFailed when a rollout
    or a merge fails, NothingLearned when a round has no reward at all, PushFailed when the engines refuse new weights.
    """
    stop = stop or threading.Event()
    all_rounds = rounds.of(config)
    if config.checkpoints.every != 1:
        raise BadInput(f"[checkpoints] every is {config.checkpoints.every!r}: in a loop it is 1, for engines read them")
    with alone(config.out, PATIENCE_S) as lock:
        trainer = Trainer(config)
        trainer.advance = advance
        trainer.serve()
        ended = threading.Event()
        maker = Maker(all_rounds, lock, lambda: stop.is_set() or ended.is_set())
        try:
            with ThreadPoolExecutor(1) as pool, _setting(ended):
                begin = partial(pool.submit, maker.make)
                learn(config, trainer, begin, maker.learned(trainer), seen=seen, say=say, stop=stop)
        except Stopped:
            say("stopped; started again, the loop goes on from here")
        return trainer.step


@contextmanager
def _setting(ended: threading.Event) -> Generator[None]:
    """However the block ends, what runs in the background is not waited for but ended."""
    try:
        yield
    finally:
        ended.set()


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes rounds, one after the other."""

    rounds: Rounds
    lock: int
    """Descriptor that children hold open."""
    stopping: Callable[[], bool]

    def learned(self, trainer: Trainer) -> int:
        """How many rounds are learned from: the first so many, for they are taken in order."""
        return next(n for n in count() if self.rounds.batch(n + 1).name not in trainer.state.batches)

    def make(self, round: int) -> Path:
        """The batch of a round: rolled out, merged, put into its place, as far as that is not done. Raises Stopped."""
        if self.stopping():
            raise Stopped
        batch = self.rounds.batch(round)
        if not batch.is_file():
            log = self.rounds.log(round)
            run_all(self.rounds.rollouts(round), log, lock=self.lock, stopping=self.stopping)
            self.rounds.shuffle(round)
            run_all([self.rounds.merge(round)], log, lock=self.lock, stopping=self.stopping)
            self.rounds.settle(round)
        return batch


def learn(
    config: Config,
    trainer: Trainer,
    begin: Callable[[int], Future[Path]],
    learned: int,
    *,
    seen: Callable[[Record], None],
    say: Callable[[str], None],
    stop: threading.Event,
) -> None:
    """Round after round behind those that are learned from; `begin` has one made in the background."""
    coming: deque[Future[Path]] = deque()
    dead = 0
    while not stop.is_set() and (left := _left(config, trainer)) > 0:
        while len(coming) < min(left, _ahead(config) + 1):
            coming.append(begin(learned + len(coming) + 1))
        say(f"waiting for the rollouts of round {learned + 1}{f'; {dead} rounds were dead' if dead else ''}")
        batch = coming.popleft().result()
        learned += 1
        if record := trainer.take(batch):
            seen(record)
        else:
            dead += 1
            say(f"round {learned} teaches nothing, the rewards of each group are equal: no update")


def _left(config: Config, trainer: Trainer) -> float:
    return float("inf") if config.updates is None else config.updates - trainer.step


def _ahead(config: Config) -> int:
    return AHEAD if config.lag.max is None else config.lag.max
