"""The rounds of a loop on disk: which tasks each has, what makes its batch, and how far it has come.

Invariant: a round is made when its batch is there, OUT/batches/round-00001.parquet, which appears whole; what else is
there of a round is finished by doing the same again. A round is made by commands of polar-toolkit, whose words stand
here; nothing is started here.

    rounds/00001/1/         the run folder of its rollout on the first engine, and so on for each engine
    rounds/00001/merged/    its trajectories
    rounds/00001.log        what these commands said
    batches/round-00001.parquet
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_toolkit import rewards
from polar_toolkit.errors import Refusal
from polar_toolkit.rollout import tasks
from polar_train.config import Config, RolloutSide
from polar_train.errors import BadInput, NothingLearned


@dataclass(frozen=True, slots=True)
class Rounds:
    """All rounds of a loop."""

    out: Path
    model: Path
    urls: tuple[str, ...]
    side: RolloutSide
    task_ids: tuple[str, ...]

    def batch(self, round: int) -> Path:
        """Where a round's batch is, once the round is made."""
        return self.out / "batches" / f"round-{round:05d}.parquet"

    def folder(self, round: int) -> Path:
        """Where a round is worked on."""
        return self.out / "rounds" / f"{round:05d}"

    def log(self, round: int) -> Path:
        """What the commands of a round said."""
        return self.folder(round).with_suffix(".log")

    def rollouts(self, round: int) -> list[list[str]]:
        """The words of the rollouts of a round, one for each engine, to be run side by side."""
        names = tasks_of(round, self.task_ids, self.side)
        return [
            self._rollout(round, self.folder(round) / str(number), url, names[number - 1 :: len(self.urls)])
            for number, url in enumerate(self.urls, start=1)
        ]

    def shuffle(self, round: int) -> None:
        """Has the rewards of a round change places, where that was asked for; rollouts.parquet keeps the true ones."""
        if not self.side.shuffle_rewards:
            return
        runs = [self.folder(round) / str(number) for number, _ in enumerate(self.urls, start=1)]
        given = [(run, session, reward) for run in runs for session, reward in sorted(rewards.read(run).items())]
        shuffled = [reward for _, _, reward in given]
        random.Random(f"{self.side.seed}/{round}").shuffle(shuffled)
        for run in runs:
            pairs = zip(given, shuffled, strict=True)
            rewards.append(run, {session: reward for (where, session, _), reward in pairs if where == run})

    def merge(self, round: int) -> list[str]:
        """The words that make a batch of them."""
        side = self.side
        packing = ["--max-tokens", str(side.max_tokens), "--weighting", side.weighting, "--advantage", side.advantage]
        return ["merge", str(self.folder(round)), *packing]

    def settle(self, round: int) -> None:
        """Puts a merged round's batch into its place. Raises NothingLearned when it has none."""
        folder = self.folder(round)
        found = sorted((folder / "merged" / "batches").glob("*.parquet"))
        if not found:
            raise NothingLearned(
                f"no attempt of round {round} has a reward and a token to train: look at rollouts.parquet in "
                f"{str(folder)!r} and at {self.log(round).name!r} beside it, remove it, and start the loop again"
            )
        _appear(self.batch(round), found[0].read_bytes())

    def _rollout(self, round: int, run: Path, url: str, names: Sequence[str]) -> list[str]:
        if (run / "rollout" / "plan.json").is_file():
            return ["rollout", "--resume", str(run), "--engine", url]
        side = self.side
        options: dict[str, object] = {
            "harness": side.harness, "way": side.way, "command": side.command, "engine": url, "tokenizer": self.model,
            "sampling": json.dumps(dict(side.sampling)), "samples": side.samples, "sandbox": side.sandbox,
            "enough": side.enough, "tries": side.tries, "seed": side.seed + round, "listen-host": side.listen_host,
            **{f"pool-{stage}": places for stage, places in side.pools.items()},
            **{name.replace("_", "-"): f"{limit:g}" for name, limit in side.budgets.items()},
        }  # fmt: skip
        only = [word for name in names for word in ("--only", name)]
        return ["rollout", str(side.tasks), str(run), *_words(options), *only]


def of(config: Config) -> Rounds:
    """The rounds that a configuration asks for. Raises BadInput when it asks for none, or for what cannot be."""
    side, urls = config.rollout, config.engines.urls
    if side is None:
        raise BadInput("the configuration has no table [rollout], which says what is rolled out: see docs/training.md")
    if not urls:
        raise BadInput("[engines] urls is empty: name the engine that the rollouts ask and that gets the new weights")
    try:
        names = tuple(task.task_id for task in tasks.read(side.tasks))
    except Refusal as refusal:
        raise BadInput(f"[rollout] tasks: {refusal}") from refusal
    if not len(urls) <= side.groups <= len(names):
        raise BadInput(
            f"[rollout] groups is {side.groups!r}: give at least the {len(urls)} of the engines, and at most the "
            f"{len(names)} tasks in {str(side.tasks)!r}"
        )
    return Rounds(config.out.resolve(), config.model.resolve(), urls, side, names)


def tasks_of(round: int, names: Sequence[str], side: RolloutSide) -> list[str]:
    """The tasks of a round: every epoch is a shuffle of all, dealt out to its rounds; what is left over waits.

    The same for the same seed, whatever was made before.
    """
    rounds = len(names) // side.groups
    epoch, place = divmod(round - 1, rounds)
    shuffled = list(names)
    random.Random(f"{side.seed}/{epoch}").shuffle(shuffled)
    return shuffled[place * side.groups : (place + 1) * side.groups]


def _words(options: Mapping[str, object]) -> Iterator[str]:
    """Flags with their values; what is "" or None is left to its default."""
    for name, value in options.items():
        if value not in ("", None):
            yield from (f"--{name}", str(value))


def _appear(target: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all, whatever is killed when."""
    target.parent.mkdir(parents=True, exist_ok=True)
    begun = target.with_name(f".{target.name}.part")
    with begun.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    begun.replace(target)
