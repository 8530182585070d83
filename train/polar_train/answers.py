"""From the events of a sequence to the JSON of `/generate`: text, ids, logprobs and meta_info as SGLang writes them.

Invariant: `output_ids` are the sampled ids, stop token included; text is only ever derived from them.
Not here: requests and errors (serve.py), the order of events (scheduler.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from polar_train.kv import Ids
from polar_train.sampling import Params
from polar_train.scheduler import Event, Finished, Prefilled, Token


class Stops:
    """What ends an output besides its length: end tokens, stop tokens, stop strings."""

    def __init__(self, params: Params, end_ids: frozenset[int], tokenizer: PreTrainedTokenizerFast) -> None:
        self._ids = frozenset[int]() if params.ignore_eos else end_ids | params.stop_token_ids
        self._strings = params.stop
        self._tokenizer = tokenizer
        lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in params.stop]
        self._tail = 1 + max(lengths, default=0)

    def __call__(self, output: Ids) -> int | str | None:
        """The stop that the last token of `output` completes.

        Like SGLang, looks for strings in as many last tokens as the longest string's own encoding has, plus one: a
        string that the model spells with more tokens is missed. Stop ids are exact.
        """
        if int(output[-1]) in self._ids:
            return int(output[-1])
        if not self._strings:
            return None
        tail = str(self._tokenizer.decode(output[-self._tail :].tolist()))
        return next((text for text in self._strings if text in tail), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a request wants to see in its answers."""

    logprobs: bool = False
    logprob_text: bool = False
    prompt_ids: bool = False
    incremental: bool = False
    """Stream what is new instead of everything so far."""


@dataclass(slots=True, kw_only=True)
class Output:
    """One output as its events have told it so far; `answer` is the JSON for now."""

    rid: str
    prompt: Ids
    params: Params
    shape: Shape
    logprob_start: int | None
    tokenizer: PreTrainedTokenizerFast
    version: str
    """The weight version at the time of the request, until a token brings its own."""
    started: float = field(default_factory=time.perf_counter)
    prefilled: Prefilled = field(default_factory=lambda: Prefilled(0, ()))
    tokens: list[Token] = field(default_factory=list[Token])
    finished: Finished | None = None
    _shown: int = 0
    _text_shown: int = 0

    def hear(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case Prefilled():
                self.prefilled = event
            case Token():
                self.tokens.append(event)
            case Finished():
                self.finished = event

    @property
    def worth_sending(self) -> bool:
        """Whether a streaming client should hear now: at the end, and every `stream_interval` tokens."""
        return self.finished is not None or len(self.tokens) - self._shown >= self.params.stream_interval

    def answer(self) -> dict[str, Any]:
        """Everything so far, or in incremental shape what the last answer did not have."""
        since = self._shown if self.shape.incremental else 0
        text = self.text()
        shown = {
            "text": text[self._text_shown :] if self.shape.incremental else text,
            "output_ids": [token.id for token in self.tokens[since:]],
            "meta_info": self._meta(since),
        }
        if self.shape.prompt_ids:
            shown["prompt_token_ids"] = self.prompt.tolist()
        self._shown, self._text_shown = len(self.tokens), len(text)
        return shown

    def text(self) -> str:
        """The output's text: without the stop, and without half a character while more may come."""
        ids = np.array([token.id for token in self.tokens], np.int32)
        matched = self.finished.reason.get("matched") if self.finished else None
        trim = not self.params.no_stop_trim
        if isinstance(matched, int) and trim:
            ids = ids[:-1]
        text = str(
            self.tokenizer.decode(
                ids.tolist(),
                skip_special_tokens=self.params.skip_special_tokens,
                spaces_between_special_tokens=self.params.spaces_between_special_tokens,
            )
        )
        if isinstance(matched, str) and trim and matched in text:
            text = text[: text.index(matched)]
        return text if self.finished else text.rstrip("\N{REPLACEMENT CHARACTER}")

    def _meta(self, since: int) -> dict[str, Any]:
        cached = self.prefilled.cached_tokens
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finished.reason if self.finished else None,
            "prompt_tokens": len(self.prompt),
            "weight_version": self.tokens[-1].version if self.tokens else self.version,
            "num_retractions": self.finished.retractions if self.finished else 0,
        }
        if self.shape.logprobs:
            meta["input_token_logprobs"] = self._input_logprobs() if since == 0 else []
            meta["output_token_logprobs"] = [self._triple(token.logprob, token.id) for token in self.tokens[since:]]
            meta["output_token_logprobs_length"] = len(self.tokens)
        meta |= {
            "reasoning_tokens": 0,
            "completion_tokens": len(self.tokens),
            "cached_tokens": cached,
            "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
            "dp_rank": None,
        }
        if self._shown == 0:
            meta["response_sent_to_client_ts"] = time.time()
        if self.finished:
            meta["weight_versions"] = _spans(self.tokens)
            meta["e2e_latency"] = time.perf_counter() - self.started
        return meta

    def _input_logprobs(self) -> list[list[Any]]:
        """Triples from `logprob_start` on; the first has no logprob, because nothing computed predicts it."""
        if self.logprob_start is None:
            return []
        ids = self.prompt[self.logprob_start :].tolist()
        return [
            self._triple(logprob, id) for logprob, id in zip((None, *self.prefilled.input_logprobs), ids, strict=False)
        ]

    def _triple(self, logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, str(self.tokenizer.decode([token])) if self.shape.logprob_text else None]


def _spans(tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Which output tokens each weight version sampled."""
    spans: list[dict[str, Any]] = []
    start = 0
    for version, group in groupby(token.version for token in tokens):
        stop = start + len(list(group))
        spans.append({"version": version, "start": start, "end": stop})
        start = stop
    return spans
