"""One generation: ask the engine, go on where a weight update or a restart cut it short, keep what was sampled.

Invariant: every sampled id is kept with its logprob and the weight version that drew it, in the order it was drawn,
whatever happens to the engine. This module decodes nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from polar_mitm.engine import Engine, Sample, Span
from polar_mitm.errors import EngineError, EngineUnavailable

Tokens = NDArray[np.int32]
_EMPTY = np.empty(0, np.int32)


class Generation:
    """What one call sampled so far."""

    def __init__(self, engine: Engine, prompt: Tokens, applied: dict[str, Any], wait: float) -> None:  # Any: JSON
        self.applied = applied
        """SGLang's sampling_params; max_new_tokens is the budget of the whole output."""
        self._engine, self._prompt, self._wait = engine, prompt, wait
        self._ids: list[Tokens] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._spans: list[Span] = []
        self._cached = self._length = 0
        self._first_ns: int | None = None
        self.finish: dict[str, Any] | None = None  # Any: JSON
        """The engine's last finish_reason."""
        self.mixed_kv = False
        """Whether tokens were drawn by a newer version on the KV cache of an older one."""

    @property
    def output_ids(self) -> Tokens:
        """All sampled ids, int32 [T]."""
        return np.concatenate(self._ids) if self._ids else _EMPTY

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Their log-probabilities, float32 [T]."""
        return np.concatenate(self._logprobs) if self._logprobs else np.empty(0, np.float32)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine had in its prefix cache."""
        return self._cached

    def columns(self) -> dict[str, Any]:  # Any: a row
        """The columns of the calls table that sampling determines."""
        return {
            "output_ids": self.output_ids,
            "logprobs": self.logprobs,
            "versions": [asdict(span) for span in self._spans],
            "temperature": self.applied.get("temperature"),
            "sampling_applied": json.dumps(self.applied),
            "engine_finish": json.dumps(self.finish) if self.finish else None,
            "cached_tokens": self._cached,
            "first_token_ns": self._first_ns,
        }

    async def pieces(self) -> AsyncGenerator[Tokens]:
        """New ids as they come, until the engine says stop or length.

        Waits up to `wait` seconds for an engine that is down or full. An abort that is not ours, or a broken stream,
        is gone on from the ids that are there; under a grammar it cannot be, because the grammar's state is lost.
        Raises EngineUnavailable or EngineError.
        """
        deadline = time.monotonic() + self._wait
        while True:
            try:
                async with aclosing(self._attempt()) as samples:
                    async for sample in samples:
                        if len(sample.ids):  # an engine that aborts every attempt at once gets nowhere
                            deadline = time.monotonic() + self._wait
                        yield sample.ids
                if self.finish and self.finish.get("type") != "abort":
                    return
                reason: Exception = EngineError(f"the engine aborted the generation: {self.finish}")
            except EngineUnavailable as error:
                reason = error
            if time.monotonic() >= deadline or ("json_schema" in self.applied and self._length):
                raise reason
            await asyncio.sleep(min(0.2, self._wait / 10))

    async def _attempt(self) -> AsyncGenerator[Sample]:
        """One request to the engine, aborted there when it is not read to its end."""
        done, start, rid, ended = self.output_ids, self._length, uuid4().hex, False
        earlier = self._spans
        applied = self.applied | {"max_new_tokens": int(self.applied["max_new_tokens"]) - start}
        try:
            prompt = np.concatenate([self._prompt, done])
            async with aclosing(self._engine.generate(prompt, applied, rid)) as samples:
                async for sample in samples:
                    self._take(sample)
                    self._spans = earlier + [
                        replace(s, start=s.start + start, end=s.end + start) for s in sample.versions
                    ]
                    ended = sample.finish is not None
                    yield sample
        finally:
            if not ended:
                await asyncio.shield(self._engine.abort(rid))

    def _take(self, sample: Sample) -> None:
        if len(sample.ids) and self._first_ns is None:
            self._first_ns = time.time_ns()
        self._ids.append(sample.ids)
        self._logprobs.append(sample.logprobs)
        self._length += len(sample.ids)
        self._cached = max(self._cached, sample.cached_tokens)
        if sample.finish is not None:
            self.finish = sample.finish
        self.mixed_kv |= len({span.version for span in sample.versions}) > 1
