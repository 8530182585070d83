"""How the run samples: the distribution belongs to the run, not to the harness.

Invariant: a token counts as trainable only when a trainer can recompute the distribution it was drawn from out of the
logits and the temperature alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from polar_mitm import conversation

_MAX_NEW_TOKENS = 1 << 20
_WHOLE = {"top_k", "max_new_tokens", "seed"}
_LEGAL: dict[str, Callable[[float], bool]] = {  # as SGLang 0.5.23 checks them
    "temperature": lambda value: 0 <= value < math.inf,
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: value == -1 or value >= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "frequency_penalty": lambda value: -2 <= value <= 2,
    "presence_penalty": lambda value: -2 <= value <= 2,
    "repetition_penalty": lambda value: 0 < value <= 2,
    "max_new_tokens": lambda value: value >= 1,
    "seed": lambda _: True,
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """The run's sampling (option `polar_sampling`)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = _MAX_NEW_TOKENS
    """Upper bound of a reply, in tokens, besides what the harness asks for and the context leaves."""
    seed: int | None = None
    """When set, each call gets a seed of its own derived from this, its session and its place in the run."""

    @classmethod
    def parse(cls, text: str) -> Sampling:
        """From a JSON object; raises ValueError that names an unknown key or a value out of range."""
        try:
            given: Any = json.loads(text or "{}")  # Any: JSON
        except ValueError as error:
            raise ValueError(f"polar_sampling: {text!r} is not a JSON object: {error}") from error
        if not isinstance(given, dict):
            raise ValueError(f"polar_sampling: {text!r} is not a JSON object")
        for key, value in given.items():
            if key not in _LEGAL:
                raise ValueError(f"polar_sampling: unknown {key!r}; known are {list(_LEGAL)}")
            if isinstance(value, bool) or not isinstance(value, int if key in _WHOLE else int | float):
                kind = "a whole number" if key in _WHOLE else "a number"
                raise ValueError(f"polar_sampling: {key} is {value!r}, give {kind}")
            if not _LEGAL[key](value):
                raise ValueError(f"polar_sampling: {key} is {value!r}, out of range")
        return cls(**given)

    def applied(
        self, asked: conversation.Sampling, room: int, stop_ids: tuple[int, ...], seed: str
    ) -> dict[str, Any]:  # Any: JSON
        """SGLang's sampling_params of one call: the run's distribution, the harness's length and schema."""
        values = asdict(self)
        base = values.pop("seed")
        values["max_new_tokens"] = max(1, min(self.max_new_tokens, asked.max_tokens or _MAX_NEW_TOKENS, room))
        values["stop_token_ids"] = list(stop_ids)
        if base is not None:
            digest = blake2b(f"{base}\0{seed}".encode(), digest_size=4).digest()
            values["sampling_seed"] = int.from_bytes(digest, "little") >> 1
        if asked.json_schema is not None:
            values["json_schema"] = asked.json_schema
        return values

    def untrainable(self, asked: conversation.Sampling) -> str | None:
        """Why tokens sampled like this cannot be trained, or None."""
        if asked.json_schema is not None:
            return "grammar"
        if self.temperature == 0:
            return "greedy"
        if self.top_p < 1 or self.top_k > 0 or self.min_p > 0:
            return "truncated"
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        return "penalty" if penalties != (0.0, 0.0, 1.0) else None
