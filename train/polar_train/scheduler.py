"""The model thread of the embedded engine: requests join and leave one running batch, step by step.

Invariant: only this thread touches the model, the keys and values and the sequences; others hand it functions to run
between two steps. Each sampled token carries the version of the weights that alone made its distribution: keys and
values never outlive their weights.
Not here: JSON, HTTP and text (answers.py, serve.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from polar_train.kv import Ids, Piece, PrefixCache, SequenceKV, forward
from polar_train.sampling import Chooser, Params

CHUNK = 512
"""Prompt tokens computed in one step, so that a long prompt does not hold back the others' next token."""
SHORT = 32
"""Prompts with at most this many tokens left to compute join a step together; a longer one is computed alone first,
so that others with the same beginning find it."""
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt has been computed."""

    cached_tokens: int
    input_logprobs: tuple[float, ...]
    """Untempered logprobs of the prompt tokens after `logprob_start`."""


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token."""

    id: int
    logprob: float
    version: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a sequence; `reason` is SGLang's finish_reason."""

    reason: dict[str, Any]  # Any: JSON
    retractions: int = 0
    """How often the sequence was computed anew under other weights."""


type Event = Prefilled | Token | Finished


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One output in the making."""

    rid: str
    params: Params
    prompt: Ids
    room: int
    """How many tokens may be sampled."""
    chooser: Chooser
    emit: Callable[[Event], None]
    stopped_by: Callable[[Ids], int | str | None]
    """The stop token or string that ends these output ids, if any."""
    logprob_start: int | None = None
    """First prompt position for which logprobs are wanted."""
    kv: SequenceKV | None = None
    cached_tokens: int = 0
    retractions: int = 0
    input_logprobs: list[float] = field(default_factory=list[float])
    _ids: Ids = field(init=False)
    _length: int = field(init=False)

    def __post_init__(self) -> None:
        self._ids = np.concatenate([self.prompt, np.empty(max(self.room, 1), np.int32)])
        self._length = len(self.prompt)

    @property
    def ids(self) -> Ids:
        """Prompt and output so far."""
        return self._ids[: self._length]

    @property
    def output(self) -> Ids:
        """The sampled tokens."""
        return self._ids[len(self.prompt) : self._length]

    @property
    def pending(self) -> Ids:
        """The tokens whose keys and values are not computed yet."""
        return self._ids[len(self.kv) if self.kv else 0 : self._length]

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self._ids[self._length] = token
        self._length += 1


class Scheduler:
    """A running batch of at most `max_batch` sequences on a thread of its own; `close` ends it."""

    def __init__(self, model: PreTrainedModel, version: str, *, max_batch: int, cache_tokens: int) -> None:
        self.version = version
        self.alive = True
        """False once the thread has ended, by `close` or by an error."""
        self._model = model
        self._max_batch = max_batch
        self._cache = PrefixCache(cache_tokens)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._paused = False
        self._when_idle: deque[Callable[[], None]] = deque()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="polar-model", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; its events come through `emit`, from the model thread."""
        self._inbox.put(lambda: self._waiting.append(sequence))

    def abort(self, rid: str) -> None:
        """End every sequence whose rid begins with `rid` (as SGLang matches); "" ends all."""
        self._inbox.put(lambda: self._abort(rid))

    def pause(self, mode: str) -> Future[None]:
        """Stop stepping; "abort" ends what runs, "retract" has it wait to be computed anew, "in_place" leaves it."""
        return self._between_steps(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Go on after `pause`."""
        return self._between_steps(lambda: setattr(self, "_paused", False))

    def flush(self) -> Future[bool]:
        """Empty the prefix cache unless something runs; whether it was emptied."""
        return self._between_steps(self._flush)

    def set_version(self, version: str, *, abort: bool) -> Future[None]:
        """Name the weights anew without changing them."""
        return self._between_steps(lambda: self._set_version(version, abort=abort))

    def swap(self, model: PreTrainedModel, version: str | None, *, abort: bool) -> Future[None]:
        """Serve another model of the same shape.

        Waits, as SGLang does, until what runs has ended; while paused it does not wait, and what runs is computed anew
        under the new weights, so its tokens carry two versions. New requests wait behind it.
        """
        done: Future[None] = Future()

        def ask() -> None:
            if abort:
                self._abort("")
            self._when_idle.append(lambda: _settle(done, lambda: self._swap(model, version)))

        self._inbox.put(ask)
        return done

    def weights(self) -> Future[PreTrainedModel]:
        """The model that the next step is computed with."""
        return self._between_steps(lambda: self._model)

    def close(self) -> None:
        """End the thread after its current step; what runs is aborted."""
        self._inbox.put(lambda: setattr(self, "alive", False))
        self._thread.join()

    def _between_steps[T](self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        self._inbox.put(lambda: _settle(done, work))
        return done

    @torch.inference_mode()
    def _loop(self) -> None:
        try:
            while self.alive:
                self._read_inbox()
                if not self._paused and self._running:
                    self._step()
        finally:  # an error of the model ends the thread: nobody may wait for it for ever, /health says 503
            self.alive = False
            with contextlib.suppress(Empty):
                while True:
                    self._inbox.get_nowait()()
            self._abort("")

    def _read_inbox(self) -> None:
        """Run what others asked for, waiting for it when there is nothing else to do; then let sequences in."""
        work = bool(self._when_idle) or (not self._paused and bool(self._running or self._waiting))
        with contextlib.suppress(Empty):  # everything was run
            self._inbox.get(block=not work)()
            while True:
                self._inbox.get_nowait()()
        while self._when_idle and (self._paused or not self._running):
            self._when_idle.popleft()()
        if not self._paused and not self._when_idle:
            self._admit()

    def _admit(self) -> None:
        """Start waiting sequences on top of the longest beginning that is known already."""
        while self._waiting and len(self._running) < self._max_batch:
            if any(len(sequence.pending) > SHORT for sequence in self._running):
                return
            sequence = self._waiting.popleft()
            self._running.append(sequence)
            self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        """Give a sequence its keys and values, copied from whoever shares most of its ids."""
        running = [other.kv for other in self._running if other.kv]
        source, shared = self._cache.longest(sequence.ids, running)
        shared = min(shared, len(sequence.ids) - 1)  # the last token's logits are needed
        if sequence.logprob_start is not None:
            shared = min(shared, sequence.logprob_start)
        capacity = len(sequence.prompt) + min(sequence.room, 256)
        sequence.kv = source.prefix(shared, capacity) if source else SequenceKV(capacity)
        if not sequence.retractions:
            sequence.cached_tokens = shared

    def _step(self) -> None:
        """One forward for all who need one token, and a piece of one long prompt."""
        chosen: list[tuple[Sequence, Piece]] = []
        prefilling = False
        for sequence in self._running:
            pending = sequence.pending
            if len(pending) > SHORT and prefilling:
                continue
            prefilling |= len(pending) > SHORT
            ids = pending[:CHUNK]
            assert sequence.kv is not None, "admitted without keys and values"
            chosen.append((sequence, Piece(sequence.kv, ids, _wanted(sequence, len(ids)))))
        logits = forward(self._model, [piece for _, piece in chosen])
        for (sequence, piece), rows_NV in zip(chosen, logits, strict=True):
            self._note(sequence, piece, rows_NV)

    def _note(self, sequence: Sequence, piece: Piece, logits_NV: Tensor) -> None:
        """Use the logits of one piece: prompt logprobs, then the next token once the prompt is whole."""
        self._note_prompt(sequence, piece, logits_NV)
        if len(sequence.pending):
            return
        if not len(sequence.output):
            sequence.emit(Prefilled(sequence.cached_tokens, tuple(sequence.input_logprobs)))
        if sequence.room == 0:
            self._finish(sequence, {"type": "length", "length": 0})
            return
        token, logprob = sequence.chooser.choose(logits_NV[-1])
        sequence.append(token)
        sequence.emit(Token(token, logprob, self.version))
        if reason := _finish_reason(sequence):
            self._finish(sequence, reason)

    def _note_prompt(self, sequence: Sequence, piece: Piece, logits_NV: Tensor) -> None:
        """Collect the untempered logprobs of the prompt tokens that this piece predicts."""
        if sequence.logprob_start is None or len(sequence.output):
            return
        done = len(piece.kv)
        positions = range(done - piece.wanted, done)  # a logit row at p speaks of the token at p + 1
        wanted = [p for p in positions if sequence.logprob_start <= p < len(sequence.prompt) - 1]
        if wanted:
            rows_NV = logits_NV[wanted[0] - positions[0] :][: len(wanted)].log_softmax(-1)
            targets_N = torch.from_numpy(sequence.prompt[wanted[0] + 1 : wanted[-1] + 2]).long()
            sequence.input_logprobs.extend(rows_NV.gather(1, targets_N[:, None])[:, 0].tolist())

    def _finish(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        """Let a sequence go; what it computed serves those who begin alike."""
        if sequence in self._running:
            self._running.remove(sequence)
            if sequence.kv:
                self._cache.add(sequence.kv)
        sequence.kv = None
        sequence.emit(Finished(reason, sequence.retractions))

    def _abort(self, rid: str) -> None:
        for sequence in [*self._running, *self._waiting]:
            if sequence.rid.startswith(rid):
                self._finish(sequence, ABORTED)
        self._waiting = deque(waiting for waiting in self._waiting if not waiting.rid.startswith(rid))

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            self._abort("")
        if mode == "retract":
            self._retract()
        self._paused = True

    def _retract(self) -> None:
        """Have what runs wait, to be computed anew."""
        for sequence in reversed(self._running):
            sequence.kv = None
            sequence.retractions += 1
            self._waiting.appendleft(sequence)
        self._running.clear()

    def _flush(self) -> bool:
        if self._running or (self._waiting and not self._paused):
            return False
        self._cache.clear()
        return True

    def _set_version(self, version: str, *, abort: bool) -> None:
        if abort:
            self._abort("")
        self.version = version

    def _swap(self, model: PreTrainedModel, version: str | None) -> None:
        """Other weights: nothing computed with the old ones is used again."""
        self._model = model
        self.version = self.version if version is None else version
        self._cache.clear()
        self._retract()


def _settle[T](done: Future[T], work: Callable[[], T]) -> None:
    done.set_result(work())


def _wanted(sequence: Sequence, new: int) -> int:
    """How many of the next `new` tokens need logits: the last one, and the prompt's from `logprob_start`."""
    if sequence.logprob_start is None or len(sequence.output) or sequence.kv is None:
        return 1
    return max(1, min(new, len(sequence.kv) + new - sequence.logprob_start))


def _finish_reason(sequence: Sequence) -> dict[str, Any] | None:
    """Why this sequence has ended, in the order in which SGLang looks (a full output is a "length" even after EOS)."""
    output = sequence.output
    if len(output) >= sequence.room:
        return {"type": "length", "length": sequence.room}
    if sequence.chooser.finished:
        return {"type": "stop", "matched": int(output[-1])}
    matched = sequence.stopped_by(output)
    return None if matched is None else {"type": "stop", "matched": matched}
