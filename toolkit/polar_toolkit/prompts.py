"""Prompts of one session as ropes: each call's own tokens plus a reference to the path it extends.

Invariant: a call without a fault has exactly the prompt whose hash was recorded when it was sent; memory and time are
linear in what is stored (a chained hash, no materialised prompts). A prompt without a recorded hash, as of imported
records, is taken as it is. This module does not look for parents that were not stored (openings.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from polar_toolkit.calls import Call, Int32s

LOGPROB_ROUNDING = 1e-6
"""A log-probability may exceed 0 by this much; float32 kernels round."""
ENDING = 16
"""Tokens at the end of a prompt by which most prompts of one length are told apart."""


@dataclass(frozen=True, slots=True)
class Rope:
    """A prompt: the first `shared` tokens of the parent's prompt + output, then `suffix`."""

    parent: int
    """Index of the parent in the session's calls; -1 when the whole prompt is in `suffix`."""
    shared: int
    """0 for a root; otherwise more than the parent's prompt, so at least one of its sampled tokens."""
    suffix: Int32s


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a session's calls; all sequences are indexed like `calls`."""

    calls: Sequence[Call]
    ropes: list[Rope]
    """As stored where the prompt cannot be rebuilt; otherwise over the nearest ancestor that gives a sampled token."""
    intact: list[bool]
    """Whether the prompt can be rebuilt and is the one that was sent."""
    faults: list[str | None]
    """Why a call is quarantined: a reason, or None."""


def resolve(calls: Sequence[Call]) -> Prompts:
    """Rebuild and verify all prompts of one session. Never raises for bad rows: it names their fault."""
    ropes = [_stored(call, parent) for call, parent in zip(calls, _parents(calls), strict=True)]
    prompts = Prompts(calls, ropes, [False] * len(calls), ["unresolved_parent"] * len(calls))
    hashes = _Hashes(prompts) if any(call.prompt_hash is not None for call in calls) else None
    plain = _outputs_are_plain(calls)
    for index in _parents_first(ropes):
        fault = _settle(prompts, index, hashes)
        prompts.intact[index] = fault is None
        prompts.faults[index] = fault or _output_fault(calls[index], plain=plain)
    for index in _duplicates(calls):
        prompts.faults[index] = "duplicate_call"
    return prompts


def path_ids(prompts: Prompts, index: int, length: int) -> Int32s:
    """The first `length` tokens of a call's prompt + output, int32; a view where they are stored in one piece."""
    pieces = [piece for _, piece in _pieces(prompts, index, length)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces[::-1]) if pieces else np.empty(0, np.int32)


def begins_with(ids: Int32s, prompts: Prompts, index: int) -> bool:
    """Whether `ids` begins with a call's whole prompt. Copies nothing."""
    length = prompts.calls[index].prompt_len
    if length > len(ids) or ids[max(0, length - ENDING) : length].tobytes() != ending(prompts, index):
        return False
    return all(np.array_equal(ids[at : at + len(piece)], piece) for at, piece in _pieces(prompts, index, length))


def same_prompts(prompts: Prompts) -> list[list[int]]:
    """Intact calls with an output, grouped by equal prompt; groups and their members in order of index."""
    alike: dict[tuple[int, bytes], list[int]] = {}
    for index, call in enumerate(prompts.calls):
        if prompts.intact[index] and len(call.output_ids):
            alike.setdefault((call.prompt_len, ending(prompts, index)), []).append(index)
    groups: list[list[int]] = []
    for indices in alike.values():
        groups += [indices] if len(indices) == 1 else _told_apart(prompts, indices)
    return groups


def ending(prompts: Prompts, index: int) -> bytes:
    """The last ENDING tokens of a call's prompt, or all of a shorter one, as bytes."""
    suffix, length = prompts.ropes[index].suffix, prompts.calls[index].prompt_len
    if len(suffix) >= ENDING:
        return suffix[-ENDING:].tobytes()
    last = b""
    for _, piece in _pieces(prompts, index, length):
        last = piece[max(0, len(piece) - ENDING) :].tobytes() + last
        if len(last) >= ENDING * piece.itemsize:
            break
    return last[-ENDING * suffix.itemsize :]


@dataclass(frozen=True, slots=True)
class _Hashes:
    """blake2b-16 of token ids as little-endian int32, carried on from parent to child."""

    prompts: Prompts
    at_prompt: dict[int, hashlib.blake2b] = field(default_factory=dict)
    at_tip: dict[int, hashlib.blake2b] = field(default_factory=dict)

    def agree(self, index: int) -> bool:
        """Whether the prompt has the recorded hash, if there is one. Its parent was asked for before."""
        rope, recorded = self.prompts.ropes[index], self.prompts.calls[index].prompt_hash
        state = hashlib.blake2b(digest_size=16) if rope.parent < 0 else self._up_to(rope.parent, rope.shared)
        _feed(state, rope.suffix)
        self.at_prompt[index] = state
        return recorded is None or state.digest() == recorded

    def _up_to(self, parent: int, length: int) -> hashlib.blake2b:
        """A state of its own for the first `length` tokens of a path that ends in the parent's output."""
        call = self.prompts.calls[parent]
        if length == call.tip_len and parent in self.at_tip:
            return self.at_tip[parent].copy()
        state = self.at_prompt[parent].copy()
        _feed(state, call.output_ids[: length - call.prompt_len])
        if length == call.tip_len:
            self.at_tip[parent] = state.copy()
        return state


def _feed(state: hashlib.blake2b, ids: Int32s) -> None:
    state.update(np.ascontiguousarray(ids, "<i4").data)


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


def _settle(prompts: Prompts, index: int, hashes: _Hashes | None) -> str | None:
    """Why the prompt of a call cannot be rebuilt; None, and its rope in place, when it can. Parents come first."""
    call, rope = prompts.calls[index], prompts.ropes[index]
    available = 0 if rope.parent < 0 else prompts.calls[rope.parent].tip_len
    if not 0 <= rope.shared <= available or rope.shared + len(rope.suffix) != call.prompt_len:
        return "prompt_length"
    if rope.parent >= 0 and not prompts.intact[rope.parent]:
        return "unresolved_parent"
    prompts.ropes[index] = _climb(prompts, rope)
    return None if hashes is None or hashes.agree(index) else "prompt_hash"


def _climb(prompts: Prompts, rope: Rope) -> Rope:
    """The rope over the nearest ancestor of whose output it contains a token; a root when there is none.

    A stored parent may share only tokens that the parent itself took from further up.
    """
    while rope.parent >= 0 and rope.shared <= prompts.calls[rope.parent].prompt_len:
        above = prompts.ropes[rope.parent]
        own = above.suffix[: max(0, rope.shared - above.shared)]
        suffix = np.concatenate([own, rope.suffix]) if len(own) else rope.suffix
        rope = Rope(above.parent, min(rope.shared, above.shared), suffix)
    return rope


def _outputs_are_plain(calls: Sequence[Call]) -> bool:
    """Whether no output of the session has a negative id or an impossible log-probability: one look at all of them."""
    ids, logprobs = (np.concatenate(of) for of in zip(*((c.output_ids, c.logprobs) for c in calls), strict=True))
    possible = not len(logprobs) or (logprobs.max() <= LOGPROB_ROUNDING and logprobs.min() > -np.inf)
    return bool(possible and (not len(ids) or ids.min() >= 0))  # a NaN fails both comparisons


def _output_fault(call: Call, *, plain: bool) -> str | None:
    if len(call.output_ids) != len(call.logprobs):
        return "logprobs_length"
    if not plain:
        if not np.isfinite(call.logprobs).all() or (call.logprobs > LOGPROB_ROUNDING).any():
            return "logprobs_range"
        if (call.output_ids < 0).any():
            return "negative_id"
    if len(call.output_ids) and not call.prompt_len:
        return "empty_prompt"
    if call.trainable and not (call.temperature and 0 < call.temperature < np.inf):
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


def _pieces(prompts: Prompts, index: int, length: int) -> Iterable[tuple[int, Int32s]]:
    """The first `length` tokens of a call's prompt + output as (start, stored tokens), from the last to the first."""
    while index >= 0 and length > 0:
        call, rope = prompts.calls[index], prompts.ropes[index]
        if length > call.prompt_len:
            yield call.prompt_len, call.output_ids[: length - call.prompt_len]
        if min(length, call.prompt_len) > rope.shared:
            yield rope.shared, rope.suffix[: min(length, call.prompt_len) - rope.shared]
        index, length = rope.parent, min(length, rope.shared)


def _told_apart(prompts: Prompts, indices: Sequence[int]) -> Iterable[list[int]]:
    """Calls whose prompts have one length and one ending, by equal prompt: by hash where all have one."""
    calls = [prompts.calls[index] for index in indices]
    hashes = [call.prompt_hash for call in calls]
    if None in hashes:
        hashes = [path_ids(prompts, i, call.prompt_len).tobytes() for i, call in zip(indices, calls, strict=True)]
    groups: dict[bytes | None, list[int]] = {}
    for index, key in zip(indices, hashes, strict=True):
        groups.setdefault(key, []).append(index)
    return groups.values()
