"""New weights for a set of engines: all of them serve the checkpoint afterwards, or none does.

Invariant: from the first changed weight until every engine is known to hold the same new ones, none samples a token;
after a failure either all that still answer serve the old weights again, or all stay paused.
Not here: how one engine is asked (control.py), and the checkpoint itself (weights.py).

Two proofs, because SGLang answers no /generate while it is paused and continuing one engine for a probe would let other
requests in. While all are paused: each names the version, its checksums have changed, and engines of one kind have the
same. Once they go on: the logprobs of a probe are the checkpoint's; if not, all are paused again, what runs is aborted,
and the old weights come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from polar_train.control import Engine, Held
from polar_train.errors import BadInput, PushFailed, TrainError
from polar_train.weights import Probe, Push, check_probe, probe_of


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push to a set of engines did."""

    each: tuple[Push, ...]
    """In the order of the urls."""
    idle_s: float
    """Seconds from the first pause to the last continue, in which nothing was sampled."""


def push(checkpoint: Path, urls: Sequence[str], version: str, *, previous: Path | None = None) -> Pushed:
    """Loads a checkpoint into all engines under a version, and proves that it is what each serves.

    `previous` is the folder of the weights that come back on a failure; the one that each engine names if not given.
    Raises BadInput, with no engine touched, for a checkpoint that does not load, or an engine that does not answer;
    PushFailed when an engine refuses, dies or shows other weights, with what each engine holds then.
    """
    probe = probe_of(checkpoint)
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(Engine(url))) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        if not engines:
            raise BadInput("no engine to push to: give at least one URL")
        pool = stack.enter_context(ThreadPoolExecutor(len(engines)))
        return _Set(engines, pool, version, previous).push(checkpoint.resolve(), probe)


class _Failures(Exception):
    """What went wrong in one step, by engine."""

    def __init__(self, failures: Mapping[Engine, TrainError]) -> None:
        super().__init__("; ".join(f"{engine.url}: {error}" for engine, error in failures.items()))
        self.failures = failures


class _Set:
    """The engines of one push, and what they held before it."""

    def __init__(self, engines: list[Engine], pool: ThreadPoolExecutor, version: str, previous: Path | None) -> None:
        self._engines, self._pool, self._version, self._previous = engines, pool, version, previous
        self._before: dict[Engine, Held] = {}
        self._sampled = False
        """Whether a token may have been sampled with the new weights."""

    def push(self, checkpoint: Path, probe: Probe) -> Pushed:
        """Pause, load, look, continue, probe."""
        try:
            self._before = self._each(Engine.held)
        except _Failures as failed:
            absent = any(isinstance(error, BadInput) for error in failed.failures.values())
            raise (BadInput if absent else PushFailed)(f"nothing was pushed: {failed}") from failed
        began = time.monotonic()
        try:
            self._each(lambda engine: engine.pause("retract"))
            self._each(lambda engine: engine.load(checkpoint, self._version))
            after = self._each(Engine.held)
            self._check_held(after)
            self._sampled = True
            self._each(Engine.resume)
            idle_s = time.monotonic() - began
            pushes = self._each(lambda engine: self._prove(engine, after[engine], probe))
        except _Failures as failed:
            raise PushFailed(f"the push of {self._version!r} failed. {failed}. {self._go_back()}") from failed
        except KeyboardInterrupt:
            self._go_back()
            raise
        return Pushed(tuple(pushes[engine] for engine in self._engines), idle_s)

    def _each[T](self, work: Callable[[Engine], T]) -> dict[Engine, T]:
        """Does something with all engines at once. Raises _Failures after all are done."""
        futures: dict[Engine, Future[T]] = {engine: self._pool.submit(work, engine) for engine in self._engines}
        try:
            wait(futures.values())
        except KeyboardInterrupt:  # what was asked of the engines cannot be called back
            wait(futures.values())
            raise
        failures: dict[Engine, TrainError] = {}
        for engine, future in futures.items():
            try:
                future.result()
            except TrainError as error:  # told with those of the other engines
                failures[engine] = error
        if failures:
            raise _Failures(failures)
        return {engine: future.result() for engine, future in futures.items()}

    def _check_held(self, after: Mapping[Engine, Held]) -> None:
        """Raises _Failures unless all engines hold weights that are new, and the same."""
        failures: dict[Engine, TrainError] = {}
        for engine, held in after.items():
            before = self._before[engine]
            if held.version != self._version:
                failures[engine] = PushFailed(f"it names its weights {held.version!r}, not {self._version!r}")
            elif before.version != self._version and not held.changed(before):
                failures[engine] = PushFailed(f"its weights are still those of {before.version!r}, or equal to them")
        if not failures:
            failures = _contradictions(after)
        if failures:
            raise _Failures(failures)

    def _prove(self, engine: Engine, after: Held, probe: Probe) -> Push:
        logprobs_T, before = engine.logprobs(probe.ids_T), self._before[engine]
        seen = Push(
            url=engine.url,
            version_before=before.version,
            version_after=after.version,
            tensors=len(after.checksums),
            changed=after.changed(before),
            tokens=len(logprobs_T),
            disagreement=probe.disagreement(logprobs_T),
        )
        check_probe(seen, engine.precision())
        return seen

    # --------------------------------------------------------------------------------------------- after a failure

    def _go_back(self) -> str:
        """Puts the old weights back and lets all go on; if that fails, all stay paused. Says what each holds."""
        restored = {engine: self._pool.submit(self._restore, engine) for engine in self._engines}
        outcomes = {engine: future.result() for engine, future in restored.items()}
        told = "; ".join(f"{engine.url} {outcome.said}" for engine, outcome in outcomes.items())
        if _contradictions(self._before) or any(outcome.stuck for outcome in outcomes.values()):
            return f"All engines that answer stay paused ({told}): push weights that each can read, or start them anew"
        for engine in self._engines:
            with suppress(TrainError):  # it is gone or cannot go on, and so serves nothing
                engine.resume()
        return f"The old weights are back and serve again ({told})"

    def _restore(self, engine: Engine) -> _Outcome:
        before = self._before[engine]
        try:
            if self._sampled:
                engine.pause("abort")
                engine.pause("retract")  # SGLang's "abort" holds new requests back, and lets the scheduler run on
            held = engine.held()
            if held.changed(before) or held.version != before.version:
                engine.load(self._previous.resolve() if self._previous else before.folder, before.version)
                held = engine.held()
        except BadInput as error:
            return _Outcome(f"is gone: {error}")
        except PushFailed as error:  # it answers, and cannot be helped from here
            return _Outcome(f"did not take its old weights back: {error}", stuck=True)
        if held.changed(before):
            return _Outcome(f"holds other weights than before under the name {held.version!r}", stuck=True)
        return _Outcome(f"holds {held.version!r}")


@dataclass(frozen=True, slots=True)
class _Outcome:
    said: str
    stuck: bool = False
    """Whether it answers but does not hold its old weights."""


def _contradictions(held: Mapping[Engine, Held]) -> dict[Engine, TrainError]:
    """The engines whose weights are not those of the first engine of their kind."""
    found: dict[Engine, TrainError] = {}
    for index, (engine, weights) in enumerate(held.items()):
        for other, others in list(held.items())[:index]:
            if weights.contradicts(others):
                many = weights.changed(others)
                found[engine] = PushFailed(f"{many} of its tensors are not those of {other.url}")
                break
    return found
