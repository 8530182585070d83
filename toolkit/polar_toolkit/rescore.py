"""Prefill a recorded call through the engine and compare its log-probabilities with the recorded ones.

Invariant: the engine sees exactly the recorded prompt and output ids, and like is compared with like: SGLang 0.5.23
does not divide the logits of a prompt by the temperature, so only calls at temperature 1, or greedy ones (recorded
untempered), are judged. It judges one call; nothing is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from polar_toolkit.calls import Call, Float32s, Int32s
from polar_toolkit.errors import Refusal


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Recorded and recomputed log-probabilities of a call's sampled tokens, float32, one a token."""

    output_ids: Int32s
    recorded: Float32s
    recomputed: Float32s

    @property
    def largest(self) -> float:
        """The largest absolute difference."""
        return float(np.abs(self.recorded - self.recomputed).max(initial=0.0))


def rescore(call: Call, prompt_ids: Int32s, engine: str, timeout_s: float = 600.0) -> Comparison:
    """Ask `engine` (its base URL) for the log-probabilities of a call's output behind its prompt.

    Raises Refusal when the call has no output or another temperature, or the engine is unreachable or answers
    something else.
    """
    if not len(call.output_ids):
        raise Refusal(f"call {call.call_id!r} ({call.status}) has no sampled tokens to score")
    if call.temperature not in (0.0, 1.0):
        raise Refusal(
            f"call {call.call_id!r} was sampled at temperature {call.temperature!r}; an engine scores prompts "
            "at temperature 1, so only calls at 1 (or greedy ones) can be rescored"
        )
    ids = np.concatenate([prompt_ids, call.output_ids]).tolist()
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": call.temperature},
        "return_logprob": True,
        "logprob_start_len": 0,
        "stream": False,
    }
    rows = _ask(engine, body, timeout_s)[len(prompt_ids) :]
    if [row[1] for row in rows] != call.output_ids.tolist():
        raise Refusal(f"{engine} scored other tokens than it was sent; is it an SGLang /generate endpoint?")
    return Comparison(call.output_ids, call.logprobs, np.array([row[0] for row in rows], np.float32))


def _ask(engine: str, body: dict[str, Any], timeout_s: float) -> list[Any]:  # Any: JSON values
    try:
        answer = httpx.post(f"{engine.rstrip('/')}/generate", json=body, timeout=timeout_s, trust_env=False)
        answer.raise_for_status()
        return list(answer.json()["meta_info"]["input_token_logprobs"])
    except httpx.HTTPError as error:
        raise Refusal(f"the engine at {engine} did not answer ({error}); start it or give --engine URL") from error
    except (ValueError, KeyError, TypeError) as error:
        raise Refusal(f"the engine at {engine} sent no input_token_logprobs ({error!r}); is it SGLang?") from error
