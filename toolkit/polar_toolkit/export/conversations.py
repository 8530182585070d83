"""The calls of a session with what was said in them, and the whole conversation at any of them.

Invariant: a conversation is put together from what was recorded: the parent's, its reply as sampled, and the messages
that the call added; nothing is decoded or rendered. The text of a few sessions is in memory at a time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polar_mitm import journal, rows
from polar_mitm.conversation import Message, Tool, message_from_json, part_from_json
from polar_toolkit import calls, rewards
from polar_toolkit.calls import Call, SessionKey
from polar_toolkit.errors import UnreadableFile
from polar_toolkit.export.source import Source
from polar_toolkit.tree import Node, grow

_COLUMNS = [name for name in rows.SCHEMA.names if name not in ("request", "answer")]
_SESSIONS = 16
"""Sessions that are in memory at a time: those that ran together share row groups."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A call and what was said in it."""

    node: Node
    parent: int
    """Index of the call whose conversation and reply it continues; -1 for a root."""
    messages: tuple[Message, ...]
    """What the request added to that conversation; all of it, for a root."""
    reply: Message
    tools: tuple[Tool, ...]
    finish: str | None
    model: str | None
    user_agent: str | None
    began_ns: int
    cached_tokens: int | None

    @property
    def call(self) -> Call:
        """Its row."""
        return self.node.call

    @property
    def trained(self) -> int:
        """Its trained tokens."""
        return len(self.call.output_ids) if self.node.trained else 0

    @property
    def name(self) -> str:
        """The id of the trajectory that ends with it."""
        return f"{self.call.call_id}.{self.call.choice}"


@dataclass(frozen=True, slots=True)
class Session:
    """The turns of a session, in order of (writer, sequence, choice)."""

    key: SessionKey
    group_id: str | None
    reward: float | None
    turns: tuple[Turn, ...]

    def path(self, leaf: int) -> list[int]:
        """Indices of the turns from the root to `leaf`."""
        found: list[int] = []
        while leaf >= 0:
            found.append(leaf)
            leaf = self.turns[leaf].parent
        return found[::-1]

    def leaves(self, some: Collection[int]) -> list[int]:
        """Those of the turns that none of them continues, at whatever distance."""
        before: set[int] = set()
        for turn in some:
            above = self.turns[turn].parent
            while above >= 0 and above not in before:
                before.add(above)
                above = self.turns[above].parent
        return [turn for turn in some if turn not in before]


def sessions(source: Source) -> Iterator[Session]:
    """The sessions of all runs in which something was answered: imported records have no text.

    Counts sampled tokens, and sessions left out, into `source.tally`. Raises UnreadableFile.
    """
    for session in _all(source):
        source.tally.sampled += sum(len(turn.call.output_ids) + turn.call.after_stop for turn in session.turns)
        if any(turn.reply.parts for turn in session.turns):
            yield session
        else:
            source.tally.leave_out("no_text", sum(turn.trained for turn in session.turns))


def _all(source: Source) -> Iterator[Session]:
    with tempfile.TemporaryDirectory(prefix="polar-export-") as scratch:
        for number, run in enumerate(source.runs):
            scores, copies = rewards.read(run), Path(scratch) / str(number)
            copies.mkdir()
            try:
                for table in _tables(run, copies):
                    yield _session(table, scores)
            except journal.UnreadableRun as error:
                raise UnreadableFile(str(error)) from error


def _tables(run: Path, scratch: Path) -> Iterator[pa.Table]:
    """The calls of each session, sessions in the order in which they are first met; a few are read together."""
    places: dict[str, list[tuple[Path, int]]] = {}
    for path in journal.settle(run, scratch, _COLUMNS):
        for group, (rows_of, _) in enumerate(journal.row_groups(path, ["session_id"])):
            for name in rows_of["session_id"].unique().to_pylist():
                places.setdefault(name, []).append((path, group))
    for names in batched(places, _SESSIONS):
        table = journal.read_row_groups(dict.fromkeys(p for name in names for p in places[name]), names, _COLUMNS)
        yield from (table.filter(pc.field("session_id") == name) for name in names)


def _session(table: pa.Table, scores: dict[str, float]) -> Session:
    forest = grow(calls.from_table(table))
    said = {(row["call_id"], row["choice"]): row for row in _said(table)}
    index = {node.call.key: position for position, node in enumerate(forest.nodes)}
    turns: list[Turn] = []
    tools: dict[int, tuple[Tool, ...]] = {}
    for position, node in enumerate(forest.nodes):
        row = said[node.call.key]
        parent = -1 if node.call.parent is None else index.get(node.call.parent, -1)
        tools[position] = tools.get(parent, ()) if row["tools"] is None else _tools(row["tools"])
        turns.append(_turn(node, parent, tools[position], row))
    return Session(forest.session, forest.group_id, scores.get(forest.session[1]), tuple(turns))


def _said(table: pa.Table) -> list[dict[str, Any]]:  # Any: by rows.SCHEMA
    names = ["call_id", "choice", "messages", "tools", "reply", "finish", "model", "user_agent", "began_ns"]
    return table.select([*names, "cached_tokens"]).to_pylist()


def _turn(node: Node, parent: int, tools: tuple[Tool, ...], row: dict[str, Any]) -> Turn:  # Any: by rows.SCHEMA
    return Turn(
        node=node,
        parent=parent,
        messages=tuple(message_from_json(value) for value in json.loads(row["messages"] or "[]")),
        reply=Message("assistant", tuple(part_from_json(value) for value in json.loads(row["reply"] or "[]"))),
        tools=tools,
        finish=row["finish"],
        model=row["model"],
        user_agent=row["user_agent"],
        began_ns=row["began_ns"] or 0,
        cached_tokens=row["cached_tokens"],
    )


def _tools(text: str) -> tuple[Tool, ...]:
    return tuple(Tool(**value) for value in json.loads(text))
