"""Prompts of one session as ropes: each call's own tokens plus a reference to the path it extends.

Invariant: a call without a fault has exactly the prompt whose hash was recorded when it was sent; memory and time are
linear in what is stored (a chained hash, no materialised prompts). It does not look for parents that were not stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar_toolkit.calls import Call, Int32s

LOGPROB_ROUNDING = 1e-6
"""A log-probability may exceed 0 by this much; float32 kernels round."""


@dataclass(frozen=True, slots=True)
class Rope:
    """A prompt: the first `shared` tokens of the parent's prompt + output, then `suffix`."""

    parent: int
    """Index of the parent in the session's calls; -1 when the whole prompt is in `suffix`."""
    shared: int
    suffix: Int32s


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a session's calls; all sequences are indexed like `calls`."""

    calls: Sequence[Call]
    ropes: list[Rope]
    digests: list[bytes | None]
    """blake2b-16 of the prompt; None where it cannot be rebuilt."""
    faults: list[str | None]
    """Why a call is quarantined: a reason, or None."""


def resolve(calls: Sequence[Call]) -> Prompts:
    """Rebuild and verify all prompts of one session. Never raises for bad rows: it names their fault."""
    ropes = [_stored(call, parent) for call, parent in zip(calls, _parents(calls), strict=True)]
    prompts = Prompts(calls, ropes, [None] * len(calls), ["unresolved_parent"] * len(calls))
    states: dict[int, hashlib.blake2b] = {}
    for index in _parents_first(ropes):
        prompts.faults[index] = _verify(prompts, index, states)
    for index in _duplicates(calls):
        prompts.faults[index] = "duplicate_call"
    for index in sorted(states, key=lambda i: calls[i].prompt_len):
        prompts.ropes[index] = _climb(prompts, index)
    return prompts


def path_ids(prompts: Prompts, index: int, length: int) -> Int32s:
    """The first `length` tokens of a call's prompt + output, int32."""
    pieces: list[Int32s] = []
    while index >= 0 and length > 0:
        call, rope = prompts.calls[index], prompts.ropes[index]
        if length > call.prompt_len:
            pieces.append(call.output_ids[: length - call.prompt_len])
        pieces.append(rope.suffix[: max(0, min(length, call.prompt_len) - rope.shared)])
        index, length = rope.parent, min(length, rope.shared)
    return np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)


def hash_ids(state: hashlib.blake2b, ids: Int32s) -> None:
    """Feed token ids to a hash as little-endian int32."""
    state.update(np.ascontiguousarray(ids, "<i4").data)


def new_hash() -> hashlib.blake2b:
    """The hash of `prompt_hash`, empty."""
    return hashlib.blake2b(digest_size=16)


def _parents(calls: Sequence[Call]) -> list[int]:
    index: dict[tuple[str, int], int] = {}
    for position, call in enumerate(calls):
        index.setdefault(call.key, position)
    return [-1 if call.parent is None else index.get(call.parent, -2) for call in calls]


def _stored(call: Call, parent: int) -> Rope:
    return Rope(parent, call.prompt_shared, call.prompt_suffix)


def _parents_first(ropes: list[Rope]) -> list[int]:
    """Indices with every parent before its children; calls below a missing parent or a cycle are left out."""
    children: dict[int, list[int]] = {}
    for index, rope in enumerate(ropes):
        children.setdefault(rope.parent, []).append(index)
    reached = list(children.get(-1, ()))
    for index in reached:  # grows while it is read: breadth first, no recursion
        reached.extend(children.get(index, ()))
    return reached


def _verify(prompts: Prompts, index: int, states: dict[int, hashlib.blake2b]) -> str | None:
    """The fault of a call whose parent was verified before it. Leaves the hash of its prompt + output in `states`."""
    call, rope = prompts.calls[index], prompts.ropes[index]
    available = 0 if rope.parent < 0 else prompts.calls[rope.parent].tip_len
    if rope.shared > available or rope.shared + len(rope.suffix) != call.prompt_len:
        return "prompt_length"
    state = _prefix_state(prompts, rope, states)
    if state is None:
        return "unresolved_parent"
    hash_ids(state, rope.suffix)
    prompt = state.digest()
    if call.prompt_hash is not None and prompt != call.prompt_hash:
        return "prompt_hash"
    hash_ids(state, call.output_ids)
    states[index] = state
    prompts.digests[index] = prompt
    return _output_fault(call)


def _prefix_state(prompts: Prompts, rope: Rope, states: dict[int, hashlib.blake2b]) -> hashlib.blake2b | None:
    if rope.parent < 0:
        return new_hash()
    if rope.parent not in states:
        return None
    if rope.shared == prompts.calls[rope.parent].tip_len:
        return states[rope.parent].copy()
    state = new_hash()
    hash_ids(state, path_ids(prompts, rope.parent, rope.shared))
    return state


def _output_fault(call: Call) -> str | None:
    if len(call.output_ids) != len(call.logprobs):
        return "logprobs_length"
    if not np.isfinite(call.logprobs).all() or (call.logprobs > LOGPROB_ROUNDING).any():
        return "logprobs_range"
    if (call.output_ids < 0).any():
        return "negative_id"
    if len(call.output_ids) and not call.prompt_len:
        return "empty_prompt"
    if call.trainable and not (call.temperature and np.isfinite(call.temperature) and call.temperature > 0):
        return "temperature"
    return None


def _duplicates(calls: Sequence[Call]) -> list[int]:
    seen: set[tuple[str, int]] = set()
    repeated: list[int] = []
    for index, call in enumerate(calls):
        if call.key in seen:
            repeated.append(index)
        seen.add(call.key)
    return repeated


def _climb(prompts: Prompts, index: int) -> Rope:
    """The rope over the nearest ancestor of whose output it contains a token; a root when there is none.

    A stored parent may share only tokens that the parent itself took from further up.
    """
    rope = prompts.ropes[index]
    while rope.parent >= 0 and rope.shared <= prompts.calls[rope.parent].prompt_len:
        above = prompts.ropes[rope.parent]
        own = above.suffix[: max(0, rope.shared - above.shared)]
        suffix = np.concatenate([own, rope.suffix]) if len(own) else rope.suffix
        rope = Rope(above.parent, min(rope.shared, above.shared), suffix)
    return rope
