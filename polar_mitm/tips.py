"""The finished calls of a run that a later call may continue, and the search for the one that a request continues.

Invariant: a call is attached to a parent only when its history equals the parent's history and reply (see
`conversation.canonical`), with no reasoning in it that was not sampled; an echoed id says which of several equal
candidates is meant, it never attaches by itself. A call is kept without what its parent holds, so that a session costs
its length, not the sum over its turns.
This module reads no files: what it has forgotten is read again by `desk`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import zstandard
from numpy.typing import NDArray

from polar_mitm.conversation import (
    Conversation,
    Message,
    Part,
    Tool,
    history_keys,
    message_from_json,
    part_from_json,
    tools_key,
)
from polar_mitm.identity import Kind
from polar_mitm.journal import Outline
from polar_mitm.thinking import is_of, thought, thought_key

Tokens = NDArray[np.int32]
Evidence = Literal["pointer", "history"]
RootReason = Literal[
    "first", "subagent", "compaction", "edited_history", "tools_changed", "bridge_refused", "template_rewrites",
    "unknown_history",
]  # fmt: skip
Place = tuple[str, int]
"""Call id and choice."""
Row = Mapping[str, Any]  # Any: a column's value, typed by rows.SCHEMA

_DEFAULT_BYTES = 256 << 20
_FASTEST = 1
"""zstd's level: what was said takes a quarter of its text, and less time than the text takes to be written."""
_CALL_BYTES = 2_000  # what the objects of a kept call weigh besides its buffers and texts, measured on Python 3.13
_STATEFUL = "openai_responses"
"""The protocol whose requests may name an earlier answer instead of repeating it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What was said in a call, as its row has it."""

    packed: bytes
    """zstd of JSON: messages after the parent's history and reply, parts of the reply, tools (null: the parent's)."""
    answer: str | None
    """JSON: the plain answer; only of protocols in which a request may name an earlier answer."""
    instructed: bool
    """Whether its first message are the request's own `instructions`, which no later request takes over."""

    @classmethod
    def of(cls, row: Row, *, instructed: bool) -> Said:
        """From the row of a completed call."""
        whole = f"[{row['messages']},{row['reply']},{row['tools'] or 'null'}]"
        answer = row["answer"] if row["dialect"] == _STATEFUL else None
        return cls(zstandard.compress(whole.encode(), _FASTEST), answer, instructed)

    @property
    def size(self) -> int:
        """Bytes, near enough."""
        return len(self.packed) + len(self.answer or "")

    @property
    def messages(self) -> list[Message]:
        """The new messages of the call and its reply."""
        messages, reply, _ = self._read()
        return [*map(message_from_json, messages), Message("assistant", tuple(map(part_from_json, reply)))]

    @property
    def tools(self) -> tuple[Tool, ...] | None:
        """The offered tools; None when they are the parent's."""
        tools = self._read()[2]
        return None if tools is None else tuple(Tool(**tool) for tool in tools)

    @property
    def reply(self) -> tuple[Part, ...]:
        """The parts of the reply."""
        return tuple(map(part_from_json, self._read()[1]))

    def _read(self) -> tuple[Any, Any, Any]:  # Any: JSON that a row held
        return tuple(json.loads(zstandard.decompress(self.packed)))  # pyright: ignore[reportReturnType] - see `of`


@dataclass(frozen=True, slots=True)
class Kept:
    """A finished call without what its parent holds."""

    call_id: str
    choice: int
    parent: Place | None
    suffix: Tokens
    """The prompt's tokens after the parent's prompt and output."""
    output_ids: Tokens
    history_key: bytes | None
    """Key of the history up to and including this call's reply; None when the reply cannot be extended as sampled."""
    tools_key: bytes
    outline: Outline | None = None
    """Of the whole request body, to store a child's body as a difference; None when reloaded from the journal."""
    thread: str | None = None
    kind: Kind = "agent"
    said: Said | None = None
    thought: bytes | None = None
    """Key of the reasoning of its reply; None: it is not checked."""

    @classmethod
    def of(cls, row: Row, outline: Outline | None = None, *, instructed: bool = False) -> Kept:
        """From the row of a completed call."""
        return cls(
            row["call_id"],
            row["choice"],
            (row["parent_call_id"], row["parent_choice"]) if row["parent_call_id"] else None,
            np.asarray(row["prompt_suffix"], np.int32),
            np.asarray(row["output_ids"][: row["kept_len"]], np.int32),  # what a later prompt may hold of it
            row["history_key"],
            row["tools_key"],
            outline,
            row["thread_id"],
            row["kind"],
            Said.of(row, instructed=instructed),
            thought_key(thought(map(part_from_json, json.loads(row["reply"])))),
        )

    @property
    def place(self) -> Place:
        """What names the call within its session."""
        return self.call_id, self.choice

    def reply(self) -> tuple[Part, ...]:
        """The parts of its reply, unpacked; none when they are not kept."""
        return self.said.reply if self.said else ()

    @property
    def size(self) -> int:
        """What it takes in memory, in bytes, near enough."""
        texts = self.said.size if self.said else 0
        marks = sum(map(len, self.outline.values())) if self.outline else 0
        return _CALL_BYTES + self.suffix.nbytes + self.output_ids.nbytes + marks + texts


@dataclass(frozen=True, slots=True)
class Tip:
    """A finished call with its whole context."""

    call_id: str
    choice: int
    prompt_ids: Tokens
    output_ids: Tokens
    history_key: bytes
    tools_key: bytes
    outline: Outline | None = None
    thread: str | None = None
    kind: Kind = "agent"

    @property
    def tokens(self) -> int:
        """Length of prompt and output together."""
        return len(self.prompt_ids) + len(self.output_ids)


@dataclass(frozen=True, slots=True)
class Parent:
    """The call that a request continues, and how much of its history that covers."""

    tip: Tip
    evidence: Evidence
    messages: int
    """How many leading messages of the request are the parent's history and reply."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """A call and its ancestors, with all that was said and sampled in them."""

    call_id: str
    tokens: Tokens
    """Its prompt and output."""
    said: tuple[Said, ...]
    """The root's first."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """Its history and its reply."""
        return tuple(message for each in self.said for message in each.messages)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What it was offered."""
        return next((tools for each in reversed(self.said) if (tools := each.tools) is not None), ())


@dataclass(frozen=True, slots=True)
class Past:
    """What a root with a history comes from, as far as it is in memory; nothing of it is unpacked yet."""

    nearest: Earlier | None = None
    """The call that its newest id names, else one that went on from the deepest history that they share."""
    known: tuple[tuple[int, Said], ...] = ()
    """The calls whose replies stand at these places of its history, up to the first difference."""
    named: tuple[Said, ...] = ()
    """The calls that its ids name, in their order."""
    summaries: tuple[Said, ...] = ()
    """The session's compactions."""


@dataclass(slots=True)
class _Tree:
    """A root and what continues it: the unit in which calls are forgotten."""

    session_id: str
    calls: dict[Place, Kept] = field(default_factory=dict[Place, Kept])
    size: int = 0


class Tips:
    """The calls that may be continued; beyond `max_bytes` the trees that were used longest ago are forgotten, whole.

    The tree that was used last is kept whatever its size.
    """

    def __init__(self, max_bytes: int = _DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self.size = 0
        """Bytes that the kept calls take, near enough."""
        self._trees: OrderedDict[int, _Tree] = OrderedDict()
        self._tree_of: dict[tuple[str, Place], _Tree] = {}
        self._by_history: dict[tuple[str, bytes], list[Place]] = {}
        self.forgotten: set[str] = set()
        """Sessions of which calls were forgotten; whoever reads them again takes the name out."""

    def add(self, session_id: str, call: Kept) -> None:
        """Make a finished call available as a parent. Adding it again changes nothing.

        A call whose parent was forgotten meanwhile is forgotten too: its context could not be told.
        """
        if (session_id, call.place) in self._tree_of:
            return
        tree = _Tree(session_id) if call.parent is None else self._tree_of.get((session_id, call.parent))
        if tree is None:
            self.forgotten.add(session_id)
            return
        tree.calls[call.place] = call
        tree.size += call.size
        self.size += call.size
        self._tree_of[session_id, call.place] = tree
        if call.history_key is not None:
            self._by_history.setdefault((session_id, call.history_key), []).append(call.place)
        self._use(tree)
        while self.size > self._max_bytes and len(self._trees) > 1:
            self._forget(self._trees.popitem(last=False)[1])

    def get(self, session_id: str, place: Place) -> Kept | None:
        """A call that is in memory."""
        tree = self._tree_of.get((session_id, place))
        return tree.calls[place] if tree else None

    def find(self, session_id: str, request: Conversation, pointers: Iterable[Place]) -> Parent | RootReason:
        """The parent of a request, or the reason why it is a root."""
        last = max((i for i, m in enumerate(request.messages) if m.role == "assistant"), default=-1)
        if last < 0:
            return "first"
        keys = history_keys(request.messages[: last + 1])
        named = list(pointers)
        equal = self._by_history.get((session_id, keys[last]), [])
        if not equal:
            seen = any((session_id, key) in self._by_history for key in keys)
            return (
                "edited_history" if seen or any(self._extendable(session_id, n) for n in named) else "unknown_history"
            )
        pointed = [n for n in named if n in equal]
        history = request.messages[: last + 1]
        kept = (p for p in reversed(pointed or equal) if _keeps_reasoning(self._chain_of(session_id, p), history))
        place = next(kept, None)
        if place is None:
            return "edited_history"
        tree = self._tree_of[session_id, place]
        self._use(tree)
        if tree.calls[place].tools_key != tools_key(request.tools):
            return "tools_changed"
        return Parent(_whole(tree, place), "pointer" if pointed else "history", last + 1)

    def history(self, session_id: str, place: Place) -> tuple[Message, ...] | None:
        """The messages of a call without its own instructions, and its reply; None when they are not kept."""
        tree = self._tree_of.get((session_id, place))
        chain = _chain(tree, place) if tree else []
        messages: list[Message] = []
        for call in chain:
            if call.said is None or call.said.answer is None:
                return None
            messages += call.said.messages
        if not chain or chain[-1].said is None:
            return None
        return tuple(messages[1:] if chain[-1].said.instructed else messages)

    def past(self, session_id: str, request: Conversation, pointers: Iterable[Place]) -> Past:
        """What is known of the calls that a root with a history comes from."""
        keys = enumerate(history_keys(request.messages))
        known = [(i, places[-1]) for i, key in keys if (places := self._by_history.get((session_id, key)))]
        named = [place for place in dict.fromkeys(pointers) if self.get(session_id, place)]
        compactions = [
            call.said
            for tree in self._trees.values()
            if tree.session_id == session_id
            for call in tree.calls.values()
            if call.kind == "compaction" and call.said
        ]
        return Past(
            self._nearest(session_id, known[-1][1] if known else None, named),
            tuple((index, said) for index, place in known if (said := self._said(session_id, place))),
            tuple(said for place in named if (said := self._said(session_id, place))),
            tuple(compactions),
        )

    def _nearest(self, session_id: str, deepest: Place | None, named: list[Place]) -> Earlier | None:
        place = named[-1] if named else deepest
        if place is None:
            return None
        tree = self._tree_of[session_id, place]
        if not named:  # what leaves a history shared so far is the next call of it, or nothing
            place = next((p for p, call in reversed(tree.calls.items()) if call.parent == place), place)
        chain = _chain(tree, place)
        tokens = np.concatenate([piece for call in chain for piece in (call.suffix, call.output_ids)])
        return Earlier(place[0], tokens, tuple(call.said for call in chain if call.said))

    def _chain_of(self, session_id: str, place: Place) -> list[Kept]:
        return _chain(self._tree_of[session_id, place], place)

    def _said(self, session_id: str, place: Place) -> Said | None:
        call = self.get(session_id, place)
        return call.said if call else None

    def _extendable(self, session_id: str, place: Place) -> bool:
        call = self.get(session_id, place)
        return call is not None and call.history_key is not None

    def _use(self, tree: _Tree) -> None:
        self._trees[id(tree)] = tree
        self._trees.move_to_end(id(tree))

    def _forget(self, tree: _Tree) -> None:
        self.size -= tree.size
        self.forgotten.add(tree.session_id)
        for place, call in tree.calls.items():
            del self._tree_of[tree.session_id, place]
            if call.history_key is None:
                continue
            equal = self._by_history[tree.session_id, call.history_key]
            equal.remove(place)
            if not equal:
                del self._by_history[tree.session_id, call.history_key]


def _chain(tree: _Tree, place: Place) -> list[Kept]:
    """A call and its ancestors, the root first."""
    chain = [tree.calls[place]]
    while (parent := chain[-1].parent) is not None:
        chain.append(tree.calls[parent])
    return chain[::-1]


def _keeps_reasoning(chain: list[Kept], history: tuple[Message, ...]) -> bool:
    """Whether the reasoning of the chain's replies, which end the history's, came back as it was, trimmed, or not."""
    replies = [message for message in history if message.role == "assistant"]
    pairs = zip(replies[::-1], chain[::-1], strict=False)
    return all(call.thought is None or is_of(message, call.thought, call.reply) for message, call in pairs)


def _whole(tree: _Tree, place: Place) -> Tip:
    *before, call = _chain(tree, place)
    assert call.history_key is not None
    pieces = [piece for kept in before for piece in (kept.suffix, kept.output_ids)]
    prompt = np.concatenate([*pieces, call.suffix]) if pieces else call.suffix
    return Tip(
        call.call_id, call.choice, prompt, call.output_ids, call.history_key, call.tools_key,
        call.outline, call.thread, call.kind,
    )  # fmt: skip
