"""Sampling parameters of `/generate`, and one token with its logprob out of one row of logits.

Invariant: the logprob of a token is log_softmax(logits / temperature) after the grammar's mask and before top-p,
top-k and min-p; greedy (temperature 0) is the plain log_softmax, as in SGLang.
Not here: penalties, biases, regular expressions. They would change the distribution, so asking for them is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

REFUSED = {
    "stop_regex": None, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_new_tokens": 0, "regex": None, "ebnf": None, "structural_tag": None, "logit_bias": None,
    "custom_params": None, "beam_width": None, "watermark": None, "choice": None,
}  # fmt: skip
"""Keys that SGLang knows and this engine does not, with the value that asks for nothing."""
GREEDY_BELOW = 1e-6
"""Temperatures below this are greedy."""


class Refused(ValueError):
    """A request that is answered with 400; `body` is SGLang's shape for this kind of mistake."""

    in_stream = True
    """Whether SGLang reports it inside a 200 stream when a stream was asked for."""

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"message": str(self)}}


class UnknownKey(Refused):
    """A sampling parameter that no SGLang knows; its `error` is a string."""

    in_stream = False

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": str(self)}


class Malformed(Refused):
    """Not JSON, or a value of the wrong type."""

    in_stream = False

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"object": "error", "message": str(self), "type": "Bad Request", "param": None, "code": 400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """The supported sampling parameters, with SGLang's names and defaults."""

    max_new_tokens: int | None = 128
    """None: up to the context length."""
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = 1
    json_schema: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int = 1
    sampling_seed: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


KNOWN = tuple(field.name for field in fields(Params)) + tuple(REFUSED)
NUMBERS = {"temperature", "top_p", "min_p"}
INTEGERS = {"max_new_tokens", "top_k", "n", "stream_interval", "sampling_seed"}
FLAGS = {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}


def parse_params(raw: Mapping[str, Any]) -> Params:  # Any: values straight from the request's JSON
    """The sampling parameters of a request. Raises a Refused."""
    for key in raw:
        if key not in KNOWN:
            expected = ", ".join(f"`{name}`" for name in KNOWN)
            raise UnknownKey(f"unknown field `{key}`, expected one of {expected}")
    for key, nothing in REFUSED.items():
        if raw.get(key) not in (None, nothing):
            raise Refused(f"{key}={raw[key]!r} is not supported by the embedded engine: leave it out")
    values = {key: _typed(key, value) for key, value in raw.items() if key not in REFUSED and value is not None}
    if "max_new_tokens" in raw and raw["max_new_tokens"] is None:
        values["max_new_tokens"] = None
    params = Params(**values)
    _check_ranges(params)
    return params


def _typed(key: str, value: Any) -> Any:  # Any: JSON in, the type of the field of that name out
    """`value` as the field `key` wants it."""
    if key in NUMBERS and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if key in INTEGERS and isinstance(value, int) and not isinstance(value, bool):
        return value
    if key in FLAGS and isinstance(value, bool):
        return value
    if key == "json_schema" and isinstance(value, str):
        return value
    if key == "stop":
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return tuple(text for text in texts if text)
    if key == "stop_token_ids" and isinstance(value, list) and all(isinstance(item, int) for item in value):
        return frozenset(value)
    raise Malformed(f"sampling_params.{key}: {value!r} has the wrong type")


def _check_ranges(params: Params) -> None:
    """Refuse values that no distribution has, in SGLang's words."""
    if not math.isfinite(params.temperature) or params.temperature < 0:
        raise Refused(f"temperature must be a non-negative finite number, got {params.temperature:g}.")
    if not 0 < params.top_p <= 1:
        raise Refused(f"top_p must be in (0, 1], got {params.top_p}.")
    if not 0 <= params.min_p <= 1:
        raise Refused(f"min_p must be in [0, 1], got {params.min_p}.")
    if params.top_k != -1 and params.top_k < 1:
        raise Refused(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
    if params.max_new_tokens is not None and params.max_new_tokens < 0:
        raise Refused(f"max_new_tokens must be at least 0, got {params.max_new_tokens}.")
    if params.n < 1 or params.stream_interval < 1:
        raise Refused(f"n and stream_interval must be at least 1, got {params.n} and {params.stream_interval}.")
    if params.sampling_seed is not None and not -(2**63) <= params.sampling_seed < 2**63:
        raise Refused(f"sampling_seed must fit 64 bits, got {params.sampling_seed}.")


class Chooser:
    """The sampler of one output: its random numbers and the state of its grammar, if it has one."""

    def __init__(self, params: Params, grammar: LLMatcher | None) -> None:
        self._params = params
        self._grammar = grammar
        self.finished = False
        """Whether the grammar's end has been said: after its last token it allows an end token and nothing else."""
        self._random = torch.Generator()
        if params.sampling_seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(params.sampling_seed)

    def choose(self, logits_V: Tensor) -> tuple[int, float]:
        """The next token and its logprob, from float32 logits [V]."""
        if self._grammar is not None:
            self.finished = self._grammar.is_stopped()
            logits_V = logits_V.masked_fill(~_allowed(self._grammar, logits_V.shape[0]), -torch.inf)
        if self._params.temperature >= GREEDY_BELOW:
            logits_V = logits_V / self._params.temperature
        logprobs_V = torch.log_softmax(logits_V, dim=-1)
        token = int(logprobs_V.argmax()) if self._params.greedy else self._draw(logprobs_V.exp())
        if self._grammar is not None and not self.finished:
            self._grammar.consume_token(token)
        return token, float(logprobs_V[token])

    def _draw(self, probabilities_V: Tensor) -> int:
        """One draw after top-k, top-p and min-p (the last two on the probabilities before any cut, as SGLang)."""
        top_k, top_p, min_p = self._params.top_k, self._params.top_p, self._params.min_p
        if top_k == -1 and top_p == 1 and min_p == 0:
            return int(torch.multinomial(probabilities_V, 1, generator=self._random))
        kept_V, ids_V = probabilities_V.sort(descending=True)
        before_V = kept_V.cumsum(0) - kept_V
        cut_V = (before_V > top_p) | (kept_V < kept_V[0] * min_p)
        if top_k != -1:
            cut_V[top_k:] = True
        return int(ids_V[torch.multinomial(kept_V.masked_fill(cut_V, 0.0), 1, generator=self._random)])


def grammar_of(schema: str, tokenizer: LLTokenizer) -> LLMatcher:
    """The matcher of a JSON schema, at its beginning. Raises Refused."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema)
    except ValueError as error:  # not JSON
        raise Refused(f"Failed to compile json_schema: {error}") from error
    matcher = LLMatcher(tokenizer, grammar)
    if matcher.is_error():
        raise Refused(f"Failed to compile json_schema: {matcher.get_error()}")
    return matcher


def _allowed(grammar: LLMatcher, size: int) -> Tensor:
    """Which of the `size` tokens may come next: bool [V]."""
    bits = np.frombuffer(grammar.compute_bitmask(), dtype=np.uint8)
    allowed_V = np.zeros(size, dtype=bool)
    found = np.unpackbits(bits, bitorder="little")[:size].view(bool)
    allowed_V[: found.shape[0]] = found
    return torch.from_numpy(allowed_V)
