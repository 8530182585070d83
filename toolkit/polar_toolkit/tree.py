"""The forest of a session: which call continues which, and why a call's sampled tokens are not trained.

Invariant: an edge is a fact about token ids (the child's prompt begins with the parent's prompt and at least one of its
sampled tokens), so the forest does not depend on the order of rows. Nothing is recursive. Tokens are assigned to
trajectories elsewhere (trajectories.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from polar_toolkit.calls import Call, Int32s, SessionKey
from polar_toolkit.prompts import Prompts, Rope, hash_ids, new_hash, path_ids, resolve

TRAINED_KINDS = ("agent", "subagent")
"""Kinds of calls that are trained unless the user says otherwise."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Which calls are trained."""

    kinds: Collection[str] = TRAINED_KINDS
    delivered_only: bool = False
    """Leave out calls whose answer was not written to the client as a whole."""
    max_lag: int | None = None
    """Leave out calls with a token sampled more than so many weight versions before the last of `versions`."""
    versions: Sequence[str] = ()
    """All weight versions of what is merged, the oldest first."""

    def is_stale(self, call: Call) -> bool:
        """Whether some of its tokens are of weights that are too old, or of none that `versions` names."""
        if self.max_lag is None:
            return False
        fresh = self.versions[-1 - self.max_lag :]
        return any(version not in fresh for _, _, version in call.versions)


@dataclass(frozen=True, slots=True)
class Node:
    """A call at its place in the forest."""

    call: Call
    parent: int
    """Index of the parent node; -1 for a root."""
    shared: int
    """Leading prompt tokens on the parent's path: its whole prompt and some or all of its output."""
    suffix: Int32s
    """The prompt's tokens after `shared`."""
    edge: str
    """exact, inside(n): the prompt leaves the parent's output n tokens before its end, or root(reason)."""
    evidence: str | None
    """What shows the edge: pointer or history as recorded, or tokens, when the parent was found by comparing them;
    None for a root."""
    reason: str | None
    """Why the sampled tokens are not trained; None when they are."""
    intact: bool
    """Whether the prompt was rebuilt and is the one that was sent. Otherwise the node has no edges."""

    @property
    def trained(self) -> bool:
        """Whether the node has sampled tokens to train."""
        return self.reason is None and len(self.call.output_ids) > 0

    @property
    def whole(self) -> bool:
        """Whether the edge takes over the parent's whole output."""
        return self.edge == "exact"


@dataclass(frozen=True, slots=True)
class Forest:
    """All calls of a session, in order of (writer, sequence, choice)."""

    session: SessionKey
    group_id: str | None
    nodes: tuple[Node, ...]


def grow(calls: Sequence[Call], policy: Policy = Policy()) -> Forest:
    """The forest of one session's calls. What `policy` does not train stays in the tree as context."""
    calls = sorted(calls, key=lambda call: call.order)
    prompts = resolve(calls)
    found = _attach_roots(prompts)
    reasons = [_reason(call, fault, policy) for call, fault in zip(calls, prompts.faults, strict=True)]
    for index in _superseded(prompts, reasons):
        reasons[index] = reasons[index] or "superseded"
    nodes = tuple(_node(prompts, index, reasons[index], found) for index in range(len(calls)))
    group = next((call.group_id for call in calls if call.group_id is not None), None)
    return Forest(calls[0].session, group, nodes)


def _node(prompts: Prompts, index: int, reason: str | None, found: Collection[int]) -> Node:
    call, rope = prompts.calls[index], prompts.ropes[index]
    intact = prompts.digests[index] is not None
    if not intact:
        return Node(call, -1, 0, call.prompt_suffix, "root(quarantined)", None, reason, intact=False)
    evidence = "tokens" if index in found else call.evidence if rope.parent >= 0 else None
    return Node(call, rope.parent, rope.shared, rope.suffix, _edge(prompts, index), evidence, reason, intact=True)


def _edge(prompts: Prompts, index: int) -> str:
    rope = prompts.ropes[index]
    if rope.parent < 0:
        return f"root({prompts.calls[index].root_reason or 'unknown'})"
    left = prompts.calls[rope.parent].tip_len - rope.shared
    return f"inside({left})" if left else "exact"


def _reason(call: Call, fault: str | None, policy: Policy) -> str | None:
    """The one reason under which a call's sampled tokens are listed, retries apart."""
    if call.status != "completed":
        return call.status
    if fault is not None:
        return f"quarantined_{fault}"
    if not call.trainable:
        return call.untrainable_reason or "untrainable"
    if call.kind not in policy.kinds:
        return call.kind
    if policy.delivered_only and not call.delivered:
        return "undelivered"
    return "stale" if policy.is_stale(call) else None


def _attach_roots(prompts: Prompts) -> set[int]:
    """Give every root the parent that its tokens prove, if there is one. Returns the roots that got one."""
    roots = [i for i, rope in enumerate(prompts.ropes) if rope.parent < 0 and prompts.digests[i] is not None]
    places = _Places.of(prompts)
    found: dict[int, Rope] = {}
    for root in roots:
        rope = places.parent_of(root)
        if rope is not None:
            found[root] = rope
    for root, rope in found.items():
        prompts.ropes[root] = rope
    return set(found)


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the outputs of a session start: calls by length and hash of their prompt."""

    prompts: Prompts
    lengths: tuple[int, ...]
    starts: dict[tuple[int, bytes], list[int]]

    @classmethod
    def of(cls, prompts: Prompts) -> _Places:
        starts: dict[tuple[int, bytes], list[int]] = {}
        for index, digest in enumerate(prompts.digests):
            call = prompts.calls[index]
            if digest is not None and len(call.output_ids):
                starts.setdefault((call.prompt_len, digest), []).append(index)
        return cls(prompts, tuple(sorted({length for length, _ in starts})), starts)

    def parent_of(self, root: int) -> Rope | None:
        """The call with whose prompt + output the root's prompt shares most, at least one sampled token."""
        calls = self.prompts.calls
        ids = path_ids(self.prompts, root, calls[root].prompt_len)
        best, best_rank = None, (0, False, False, False, 0)
        for index in self._begun_by(ids):
            if calls[index].tip_len < best_rank[0] or not self._is_prefix(index, ids):
                continue
            shared = self._left_at(index, ids)
            rank = (shared, *self._likeness(index, root, shared), -index)
            if shared > calls[index].prompt_len and rank > best_rank:
                best, best_rank = Rope(index, shared, ids[shared:]), rank
        return best

    def _begun_by(self, ids: Int32s) -> list[int]:
        """Calls whose prompt is a proper beginning of `ids`, by hash, the longest prompt first."""
        state, hashed = new_hash(), 0
        hits: list[int] = []
        for length in self.lengths:
            if length >= len(ids):
                break
            hash_ids(state, ids[hashed:length])
            hashed = length
            hits += self.starts.get((length, state.digest()), ())
        return hits[::-1]

    def _is_prefix(self, index: int, ids: Int32s) -> bool:
        length = self.prompts.calls[index].prompt_len
        return np.array_equal(path_ids(self.prompts, index, length), ids[:length])

    def _left_at(self, index: int, ids: Int32s) -> int:
        """Length of what `ids` shares with the call's prompt + output, its prompt being a prefix."""
        call = self.prompts.calls[index]
        own = ids[call.prompt_len : call.tip_len]
        differs = np.flatnonzero(own != call.output_ids[: len(own)])
        return call.prompt_len + (int(differs[0]) if len(differs) else len(own))

    def _likeness(self, index: int, root: int, shared: int) -> tuple[bool, bool, bool]:
        """Among equal lengths: a whole output, then the same thread, then an answer that was delivered."""
        call = self.prompts.calls[index]
        return shared == call.tip_len, call.thread_id == self.prompts.calls[root].thread_id, call.delivered


def _superseded(prompts: Prompts, reasons: Sequence[str | None]) -> Iterable[int]:
    """Calls that were asked again: of several calls with one prompt, all but those that the session went on with."""
    extended = _extended(prompts)
    for indices in _retries(prompts):
        members = {prompts.calls[i].call_id for i in indices}
        kept = members & extended or {_last_delivered(prompts, indices, reasons)}
        yield from (i for i in indices if prompts.calls[i].call_id not in kept)


def _extended(prompts: Prompts) -> set[str]:
    """Ids of the calls that another call goes on from."""
    ropes = [rope for rope, digest in zip(prompts.ropes, prompts.digests, strict=True) if digest is not None]
    return {prompts.calls[rope.parent].call_id for rope in ropes if rope.parent >= 0}


def _retries(prompts: Prompts) -> list[list[int]]:
    """Indices of the calls of a thread that have one prompt, where there are several such calls."""
    same: dict[tuple[str | None, bytes], list[int]] = {}
    for index, digest in enumerate(prompts.digests):
        if digest is not None and len(prompts.calls[index].output_ids):
            same.setdefault((prompts.calls[index].thread_id, digest), []).append(index)
    return [indices for indices in same.values() if len({prompts.calls[i].call_id for i in indices}) > 1]


def _last_delivered(prompts: Prompts, indices: Sequence[int], reasons: Sequence[str | None]) -> str:
    """The call_id to keep when the session went on with none: trainable, delivered, and last, in this order."""
    best = max(indices, key=lambda i: (reasons[i] is None, prompts.calls[i].delivered, prompts.calls[i].order))
    return prompts.calls[best].call_id
