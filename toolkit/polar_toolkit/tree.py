"""The forest of a session: which call continues which, and why a call's sampled tokens are not trained.

Invariant: an edge is a fact about token ids (the child's prompt begins with the parent's prompt and at least one of its
sampled tokens), so the forest does not depend on the order of rows. Nothing is recursive. Tokens are assigned to
trajectories elsewhere (trajectories.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from polar_toolkit.calls import Call, Int32s, SessionKey
from polar_toolkit.openings import Openings
from polar_toolkit.prompts import Prompts, resolve, same_prompts

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
    calls = sorted(calls, key=lambda call: (call.order, call.key))
    prompts = resolve(calls)
    groups = same_prompts(prompts)
    found = _attach_roots(prompts, groups)
    reasons = [_reason(call, fault, policy) for call, fault in zip(calls, prompts.faults, strict=True)]
    for index in _superseded(prompts, groups, reasons):
        reasons[index] = reasons[index] or "superseded"
    nodes = tuple(_node(prompts, index, reasons[index], found) for index in range(len(calls)))
    group = next((call.group_id for call in calls if call.group_id is not None), None)
    return Forest(calls[0].session, group, nodes)


def _node(prompts: Prompts, index: int, reason: str | None, found: Collection[int]) -> Node:
    call, rope = prompts.calls[index], prompts.ropes[index]
    if not prompts.intact[index]:
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


def _attach_roots(prompts: Prompts, groups: Sequence[Sequence[int]]) -> set[int]:
    """Give every root the parent that its tokens prove, if there is one. Returns the roots that got one."""
    roots = [i for i, rope in enumerate(prompts.ropes) if rope.parent < 0 and prompts.intact[i]]
    if len(roots) < 2:  # all others descend from the only one, so their prompts are longer
        return set()
    openings = Openings.of(prompts, groups)
    ropes = {root: openings.parent_of(root) for root in roots}
    found = {root: rope for root, rope in ropes.items() if rope is not None}
    for root, rope in found.items():
        prompts.ropes[root] = rope
    return set(found)


def _superseded(prompts: Prompts, groups: Sequence[Sequence[int]], reasons: Sequence[str | None]) -> Iterable[int]:
    """Calls that were asked again: of several calls with one prompt, all but those that the session went on with."""
    calls, extended = prompts.calls, _extended(prompts)
    for indices in _retries(calls, groups):
        kept = {calls[i].call_id for i in indices} & extended or {_last_delivered(calls, indices, reasons)}
        yield from (i for i in indices if calls[i].call_id not in kept)


def _extended(prompts: Prompts) -> set[str]:
    """Ids of the calls that another call goes on from."""
    ropes = (rope for rope, intact in zip(prompts.ropes, prompts.intact, strict=True) if intact and rope.parent >= 0)
    return {prompts.calls[rope.parent].call_id for rope in ropes}


def _retries(calls: Sequence[Call], groups: Sequence[Sequence[int]]) -> Iterable[list[int]]:
    """Of the calls with one prompt those of one thread, where there are several such calls."""
    for group in groups:
        if len(group) < 2:
            continue
        same: dict[str | None, list[int]] = {}
        for index in group:
            same.setdefault(calls[index].thread_id, []).append(index)
        yield from (indices for indices in same.values() if len({calls[i].call_id for i in indices}) > 1)


def _last_delivered(calls: Sequence[Call], indices: Sequence[int], reasons: Sequence[str | None]) -> str:
    """The call_id to keep when the session went on with none: trainable, delivered, and last, in this order."""
    best = max(indices, key=lambda i: (reasons[i] is None, calls[i].delivered, calls[i].order))
    return calls[best].call_id
