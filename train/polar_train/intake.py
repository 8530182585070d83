"""From the JSON of a `/generate` request to the outputs it asks for, or to a refusal in SGLang's words.

Invariant: what is accepted can be computed: known ids, a prompt that fits the context, supported parameters. Top-level
keys that nobody knows are ignored, as SGLang does; known ones that would change the answer are refused.
Not here: running them (scheduler.py) and writing answers (answers.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polar_train.answers import Output, Shape, Stops
from polar_train.kv import Ids
from polar_train.sampling import Chooser, Malformed, Params, Refused, grammar_of, parse_params
from polar_train.scheduler import Event, Sequence
from polar_train.served import Engine


@dataclass(frozen=True, slots=True)
class Job:
    """The outputs of one request: one, or several for a batch or n > 1."""

    outputs: list[Output]
    choosers: list[Chooser]
    several: bool
    """Whether the answer is a list."""


def read_job(engine: Engine, body: dict[str, Any]) -> Job:  # Any: the request's JSON
    """The outputs that a request asks for. Raises a Refused."""
    prompts, batched = _prompts(engine, body)
    raw = body.get("sampling_params") or {}
    settings = raw if isinstance(raw, list) else [raw] * len(prompts)
    if len(settings) != len(prompts) or not all(isinstance(item, dict) for item in settings):
        raise Malformed("1 validation error: sampling_params must be an object, or a list with one for each prompt")
    params = [parse_params(item) for item in settings]
    total = sum(item.n for item in params)
    rids = _rids(engine, body.get("rid"), total)
    shape = _shape(engine, body)
    choices = [(prompt, item, index) for prompt, item in zip(prompts, params, strict=True) for index in range(item.n)]
    outputs = [
        _output(engine, prompt, item, shape, _logprob_start(body, prompt), rid)
        for (prompt, item, _), rid in zip(choices, rids, strict=True)
    ]
    return Job(outputs, [_chooser(engine, item, index) for _, item, index in choices], batched or total > 1)


def _prompts(engine: Engine, body: dict[str, Any]) -> tuple[list[Ids], bool]:
    """The prompts, and whether they came as a batch."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    if ids is None:
        texts = text if isinstance(text, list) else [text]
        if not all(isinstance(item, str) for item in texts):
            raise Malformed(f"1 validation error: text must be a string or a list of strings, got {text!r:.80}")
        return [np.array(engine.tokenizer(item).input_ids, np.int32) for item in texts], isinstance(text, list)
    if not isinstance(ids, list):
        raise Malformed(f"1 validation error: input_ids must be list or null; got {type(ids).__name__}")
    batched = bool(ids) and isinstance(ids[0], list)
    return [checked_ids(engine, item) for item in (ids if batched else [ids])], batched


def checked_ids(engine: Engine, ids: Any) -> Ids:  # Any: JSON
    """A prompt of known ids. SGLang would take an unknown id and crash, so this is stricter on purpose."""
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise Malformed("1 validation error: input_ids must be a list of integers")
    if not ids:
        raise Refused("input_ids cannot be empty.")
    for item in (min(ids), max(ids)):
        if not 0 <= item < engine.vocab_size:
            raise Refused(f"input_ids contains {item}, outside the model's vocabulary of {engine.vocab_size}.")
    return np.array(ids, np.int32)


def _rids(engine: Engine, given: Any, total: int) -> list[str]:  # Any: JSON
    """A request id for each output: the given ones where their number fits, else fresh ones."""
    rids = given if isinstance(given, list) else [given] if given else []
    if len(rids) != total:
        rids = [uuid.uuid4().hex for _ in range(total)]
    for rid in rids:
        if not isinstance(rid, str):
            raise Malformed(f"1 validation error: rid must be a string, got {rid!r}")
        if rid in engine.rids or rids.count(rid) > 1:
            raise Refused(f"Duplicate request ID detected: {rid}")
    return rids


def _shape(engine: Engine, body: dict[str, Any]) -> Shape:
    for key in ("top_logprobs_num", "token_ids_logprob", "return_hidden_states"):
        if body.get(key):
            raise Refused(f"{key}={body[key]!r} is not supported by the embedded engine: leave it out")
    return Shape(
        logprobs=bool(body.get("return_logprob")),
        logprob_text=bool(body.get("return_text_in_logprobs")),
        prompt_ids=bool(body.get("return_prompt_token_ids")),
        incremental=engine.incremental and bool(body.get("stream")),
    )


def _logprob_start(body: dict[str, Any], prompt: Ids) -> int | None:
    start = body.get("logprob_start_len", -1)
    if not body.get("return_logprob") or start in (None, -1):
        return None
    if not isinstance(start, int) or not 0 <= start < len(prompt):
        raise Refused(f"logprob_start_len must be -1 or a position in the {len(prompt)} input tokens, got {start!r}.")
    return start


def _output(engine: Engine, prompt: Ids, params: Params, shape: Shape, logprob_start: int | None, rid: str) -> Output:
    """An output that may be started. Raises Refused when it does not fit the context."""
    limit = engine.context_length
    if len(prompt) >= limit:
        raise Refused(f"The input ({len(prompt)} tokens) is longer than the model's context length ({limit} tokens).")
    wanted = params.max_new_tokens
    if wanted is not None and len(prompt) + wanted > limit:
        raise Refused(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
            f"total of {len(prompt) + wanted} tokens: {len(prompt)} tokens from the input messages and {wanted} tokens "
            "for the completion. Please reduce the number of tokens in the input messages or the completion to fit "
            "within the limit."
        )
    return Output(
        rid=rid, prompt=prompt, params=params, shape=shape, logprob_start=logprob_start,
        tokenizer=engine.tokenizer, version=engine.scheduler.version,
    )  # fmt: skip


def _chooser(engine: Engine, params: Params, index: int) -> Chooser:
    """The sampler of choice `index`. Raises Refused when its grammar does not compile."""
    grammar = grammar_of(params.json_schema, engine.grammars) if params.json_schema else None
    if params.sampling_seed is not None:  # the choices of one request must differ
        params = replace(params, sampling_seed=params.sampling_seed + index)
    return Chooser(params, grammar)


def sequence_of(engine: Engine, output: Output, chooser: Chooser, emit: Callable[[Event], None]) -> Sequence:
    """What the scheduler needs to make an output."""
    params = output.params
    room = engine.context_length - len(output.prompt) - 1
    return Sequence(
        rid=output.rid,
        params=params,
        prompt=output.prompt,
        room=room if params.max_new_tokens is None else min(room, params.max_new_tokens),
        chooser=chooser,
        emit=emit,
        stopped_by=Stops(params, engine.end_ids, engine.tokenizer),
        logprob_start=output.logprob_start,
    )
