"""A training run, read from top to bottom: batch after batch, each a better model, until there are no more.

Invariant: a run is what is on the disk. Killed at any moment and started again, it goes on behind its newest checkpoint
with the very numbers that it would have had; a batch is learned from once; what another run wrote is not touched.
It makes no batches: they are a folder of files, which may still be filling.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from polar_train import checkpoints, engines, grpo, metrics
from polar_train.checkpoints import State
from polar_train.config import Config
from polar_train.control import Engine
from polar_train.data import BatchSummary, Row, read_batches, read_summary
from polar_train.errors import BadInput, NothingLearned
from polar_train.lag import LagFigures, Versions, bound
from polar_train.lifetime import alone
from polar_train.model import check_tokenizer, load
from polar_train.optimizer import Optimizer
from polar_train.weights import WEIGHT_SUFFIXES, write_model

LOOK_SECONDS = 0.5
"""Between two looks at a folder that is still filling."""
DONE = "done"
"""A file of this name in the folder of batches says that no more will come."""
RANDOM = "random.torch"
_ENDS = 1 << 16
"""Bytes at the end of a file that its fingerprint is of: of Parquet its statistics and offsets, of weights numbers."""


def run(
    config: Config,
    *,
    seen: Callable[[metrics.Record], None],
    advance: Callable[[int, int], None],
    say: Callable[[str], None] = lambda _line: None,
    stop: threading.Event | None = None,
) -> int:
    """Learns from the batches of a configuration, and gives the steps that the run in `out` has now made.

    Goes on behind the newest checkpoint in `out`. Ends behind `updates` steps, behind the last batch, when `stop` is
    set (see `interrupts`) behind the step that runs; never without a checkpoint of the last step. `seen` gets the
    figures of every step, `advance` the forests done and planned in it, `say` what else there is to know.

    Raises BadInput for what cannot be used, NothingLearned when no batch had anything to learn from.
    """
    with alone(config.out):
        trainer = Trainer(config)
        trainer.advance = advance
        trainer.serve()
        if trainer.step:
            say(f"going on behind step {trainer.step}")
        skipped = ""
        for batch in arriving(config, trainer, stop or threading.Event(), say):
            record = trainer.take(batch)
            if record:
                seen(record)
            else:
                skipped = f"{batch.name!r} has nothing to learn from: no trained token has an advantage"
                say(skipped)
        if skipped and not trainer.step:
            raise NothingLearned(f"no step was made: {skipped}")
        trainer.save()
        return trainer.step


def arriving(config: Config, trainer: Trainer, stop: threading.Event, say: Callable[[str], None]) -> Generator[Path]:
    """The batches that were not taken yet, in the order of their names, as they come.

    Raises BadInput when there is none and none can come.
    """
    while not stop.is_set() and (config.updates is None or trainer.step < config.updates):
        last = not config.follow or (config.batches / DONE).exists()  # asked before the look: nothing comes after it
        files = _files(config.batches)
        fresh = [file for file in files if file.name not in trainer.state.batches]
        if fresh:
            yield fresh[0]
        elif not files and last:
            raise BadInput(f"no batches at {str(config.batches)!r}: give a Parquet file or a folder of them")
        elif last:
            return
        else:
            say("waiting for a batch")
            stop.wait(LOOK_SECONDS)


class Trainer:
    """The model of a run, and all that an update of it needs; `state` says where it stands."""

    def __init__(self, config: Config) -> None:
        grpo.check_reference(config.settings, config.reference)
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.config = config
        self.advance: Callable[[int, int], None] = _silent
        """Called with the forests of a step that are done and planned."""
        self.model, self.optimizer, self.state = _begin(config)
        self._reference = load(config.reference).eval() if config.reference else None
        self._versions = Versions(config.engines.version)
        self._saved = self.step

    @property
    def step(self) -> int:
        """Batches that changed the weights."""
        return self.state.step

    @property
    def version(self) -> str:
        """Name of the weights."""
        return self.state.version

    def take(self, batch: Path) -> metrics.Record | None:
        """Learns from a batch: bounds its lag, makes the updates, writes the figures, the checkpoint, and pushes it.

        None when none of its tokens that may be trained has an advantage: the batch is then counted as taken, and
        nothing else is changed. Raises BadInput or NothingLearned before a checkpoint is written.
        """
        since = time.monotonic()
        summary = read_summary(batch)
        check_tokenizer(summary.tokenizer, self.config.model, self.config.reference)
        rows, lag = bound(read_batches(batch), self._versions, self.step, self.config.lag)
        grpo.check_vocabulary(rows, self.model, self._reference)
        taken = {**self.state.batches, batch.name: fingerprint(batch)}
        if not any(_teaches(row) for row in rows):
            self.state = replace(self.state, batches=taken)
            return None
        updates = grpo.update(
            self.model, rows, self.config.settings,
            advance=self.advance, reference=self._reference, optimizer=self.optimizer,
        )  # fmt: skip
        self.state = replace(self.state, step=self.step + 1, batches=taken)
        record = _record(self.state, batch, summary, lag, updates, time.monotonic() - since)
        metrics.append(self.config.out, record)  # before the checkpoint: who has one has the line
        if self.step % self.config.checkpoints.every == 0:
            record = replace(record, idle_s=self.save(), seconds=time.monotonic() - since)
            metrics.append(self.config.out, record)
        return record

    def save(self) -> float:
        """Writes the checkpoint of the last step, unless it is there, and pushes it to the engines.

        Gives the seconds in which they served nothing. Raises PushFailed when they do not take it.
        """
        if self._saved == self.step:
            return 0.0
        tensors = {**self.optimizer.moments(), RANDOM: torch.get_rng_state()}
        weights, source = self.optimizer.weights(), self.config.model
        written = checkpoints.write(
            self.config.out, self.state, tensors, lambda folder: write_model(self.model, source, folder, weights)
        )
        self._saved = self.step
        urls = self.config.engines.urls
        idle_s = engines.push(written, urls, self.version).idle_s if urls else 0.0
        checkpoints.prune(self.config.out, self.config.checkpoints.keep)
        return idle_s

    def serve(self) -> None:
        """Has the engines serve the newest checkpoint, where there is one.

        Raises PushFailed when they do not take it, BadInput when one does not answer, or has another name for the
        weights that the run begins with.
        """
        newest = checkpoints.newest(self.config.out)
        with ExitStack() as stack:
            each = [stack.enter_context(closing(Engine(url))) for url in self.config.engines.urls]
            behind = [(engine, held) for engine in each if (held := engine.held().version) != self.version]
            if behind and newest:
                engines.push(newest, self.config.engines.urls, self.version)
            elif behind:
                raise BadInput(
                    f"the engine at {behind[0][0].url!r} calls its weights {behind[0][1]!r}, not {self.version!r}: "
                    f"start it on the model at {str(self.config.model)!r}, and give that name as [engines] version"
                )
            for engine in each:
                engine.resume()  # a push that was killed before its end left it paused


def _begin(config: Config) -> tuple[PreTrainedModel, Optimizer, State]:
    """The model as the newest checkpoint has it, or as the run begins."""
    if Versions().step(config.engines.version):
        raise BadInput(
            f"[engines] version is {config.engines.version!r}, as later weights of this run will be called: push the "
            "model under another name, and give that"
        )
    if not config.model.is_dir():
        raise BadInput(f"no model at {str(config.model)!r}: a Hugging Face folder is needed")
    compute = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    state = State(0, fingerprint(config.model), config.engines.version, {})
    newest = checkpoints.newest(config.out)
    if not newest:
        model = load(config.model)
        return model, Optimizer(model, config.settings.lr, compute, config.settings.betas), state
    found, tensors = checkpoints.read(newest)
    _check_same(config, state, found)
    model = load(newest)
    optimizer = Optimizer(model, config.settings.lr, compute, config.settings.betas)
    optimizer.restore(tensors)
    torch.set_rng_state(tensors[RANDOM])
    return model, optimizer, found


def _check_same(config: Config, begun: State, found: State) -> None:
    """Raises BadInput when `out` holds a run of another model, or of other batches."""
    if found.model != begun.model:
        raise BadInput(
            f"{str(config.out)!r} holds a run that began with another model than {str(config.model)!r}: "
            "give another `out`"
        )
    if found.first_version != begun.first_version:
        raise BadInput(
            f"the engines called the first weights of the run in {str(config.out)!r} {found.first_version!r}, not "
            f"{begun.first_version!r}: give that as [engines] version, or another `out`"
        )
    for file in _files(config.batches):
        if file.name in found.batches and fingerprint(file) != found.batches[file.name]:
            raise BadInput(
                f"the run in {str(config.out)!r} learned from another batch of the name {file.name!r} than the one in "
                f"{str(file.parent)!r}: give another `out`, or new names to new batches"
            )


def _files(batches: Path) -> list[Path]:
    if batches.is_file():
        return [batches]
    return sorted(batches.glob("*.parquet")) if batches.is_dir() else []


def fingerprint(path: Path) -> str:
    """What tells a batch, or a model folder, from another of its name: 16 hex digits."""
    described = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if path.is_dir() and file.name != "config.json" and not file.name.endswith(WEIGHT_SUFFIXES):
            continue
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _ENDS))
            described.update(f"{file.name} {size} ".encode() + stream.read())
    return described.hexdigest()[:16]


def _teaches(row: Row) -> bool:
    return bool(np.any(row.advantages_T * row.loss_weight_T))


def _record(
    state: State, batch: Path, summary: BatchSummary, lag: LagFigures, updates: list[grpo.Update], seconds: float
) -> metrics.Record:
    first, last = updates[0], updates[-1]
    return metrics.Record(
        step=state.step,
        batch=batch.name,
        version=state.version,
        at=time.time(),
        seconds=seconds,
        reward_mean=summary.reward_mean,
        sessions=summary.sessions,
        groups=summary.groups,
        dead_groups=summary.dead_groups,
        loss=last.loss,
        grad_norm=last.grad_norm,
        ratio_mean=last.ratio_mean,
        clip_share=last.clip_share,
        kl_mean=last.kl_mean,
        entropy_mean=last.entropy_mean,
        gap_mean=first.gap_mean,
        gap_max=first.gap_max,
        lag_mean=lag.mean,
        lag_max=lag.max,
        tokens_beyond_lag=lag.tokens_beyond,
        tokens_trained=last.tokens,
        tokens_computed=sum(update.computed for update in updates),
        tokens_per_second=last.tokens / seconds,
        idle_s=0.0,
    )


def _silent(_done: int, _planned: int) -> None:
    """Nobody looks."""
