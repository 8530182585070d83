"""What people look at: the sessions of a run, the tree of a session, one call token by token.

Invariant: text is decoded from recorded ids for showing only, and never goes back into data. It reads, and writes
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from polar_toolkit import calls, prompts
from polar_toolkit.calls import Call, Int32s
from polar_toolkit.errors import Refusal
from polar_toolkit.tree import Forest, Node, grow

Decode = Callable[[Int32s], str]
PROMPT_TAIL = 200
"""Tokens of the prompt's end that are shown."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a name stands for: a session's forest, and the node of it when a call was named."""

    run: Path
    forest: Forest
    node: Node | None


def find(runs: Sequence[Path], name: str) -> Found:
    """The session of that name, else the call whose id begins with it (`CALL` or `CALL.CHOICE`). Raises Refusal."""
    places = [place for run in runs for place in _places(run)]
    for place in places:
        if place.session_id == name:
            return Found(place.run, _forest(place), None)
    hits = [place for place in places if f"{place.call_id}.{place.choice}".startswith(name)] if name else []
    if not hits:
        raise Refusal(f"no session or call {name!r}; polar-toolkit inspect without it lists the sessions")
    if len({hit.call_id for hit in hits}) > 1:
        raise Refusal(f"{name!r} begins the ids of {len(hits)} calls; give more characters")
    forest, key = _forest(hits[0]), (hits[0].call_id, hits[0].choice)
    return Found(hits[0].run, forest, next(node for node in forest.nodes if node.call.key == key))


def find_call(run: Path, name: str) -> Found:
    """Like `find`, for a call only."""
    found = find([run], name)
    if found.node is None:
        raise Refusal(f"{name!r} is a session; name one of its calls: polar-toolkit inspect {run} {name}")
    return found


def prompt_of(found: Found) -> Int32s:
    """The whole prompt of the found call, int32. Raises Refusal when it cannot be rebuilt."""
    if found.node is None or not found.node.intact:
        raise Refusal(f"the prompt of call {found.node and found.node.call.call_id!r} cannot be rebuilt from its row")
    call = found.node.call
    resolved = prompts.resolve([node.call for node in found.forest.nodes])
    index = next(i for i, node in enumerate(found.forest.nodes) if node is found.node)
    return prompts.path_ids(resolved, index, call.prompt_len)


def load_decoder(run: Path) -> Decode | None:
    """Decodes ids with the tokenizer that run.json names; None when it cannot be loaded."""
    name = calls.run_info(run).get("tokenizer")
    if not name:
        return None
    from transformers import AutoTokenizer  # a second to import: only where text is shown

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):  # no such folder, or no tokenizer in it: ids are shown without text
        return None
    return lambda ids: str(tokenizer.decode(ids.tolist()))


def session_tree(forest: Forest) -> Tree:
    """The calls of a session, each below the one it continues; a chain without branches stays on one level."""
    top = Tree(f"session {forest.session[1]} (group {forest.group_id or 'none'})")
    children: dict[int, list[int]] = {}
    for index, node in enumerate(forest.nodes):
        children.setdefault(node.parent, []).append(index)
    waiting = [(index, top) for index in reversed(children.get(-1, []))]
    while waiting:
        index, above = waiting.pop()
        branch = above.add(_line(forest.nodes[index]))
        below = children.get(index, [])
        waiting += [(child, above if len(below) == 1 else branch) for child in reversed(below)]
    return top


def call_view(found: Found, decode: Decode | None) -> RenderableType:
    """A call's row, the end of its prompt and its sampled tokens."""
    if found.node is None:
        return session_tree(found.forest)
    parts: list[RenderableType] = [_row_table(found.node)]
    if found.node.intact:
        tail = prompt_of(found)[-PROMPT_TAIL:]
        shown = decode(tail) if decode else " ".join(map(str, tail.tolist()))
        parts += [Text(f"\nprompt, last {len(tail)} tokens:", style="bold"), Text(shown)]
    return Group(*parts, _token_table(found.node.call, decode))


def text_of(token: int, decode: Decode | None) -> str:
    """A token's text, quoted; empty without a tokenizer."""
    return repr(decode(np.array([token], np.int32))) if decode else ""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row is."""

    run: Path
    session_id: str
    call_id: str
    choice: int


def _places(run: Path) -> list[_Place]:
    """Every row of a run, by its names only."""
    names = calls.table(run, ["session_id", "call_id", "choice"])
    columns = (names[name].to_pylist() for name in ("session_id", "call_id", "choice"))
    return [_Place(run, session_id or "", *key) for session_id, *key in zip(*columns, strict=True)]


def _forest(place: _Place) -> Forest:
    """The session that a row belongs to."""
    return grow(calls.from_table(calls.table(place.run, calls.COLUMNS, place.session_id)))


def _line(node: Node) -> Text:
    call = node.call
    style = "green" if node.trained else "yellow"
    text = f"{call.call_id}.{call.choice} {call.kind} {node.edge}: {call.prompt_len} + {len(call.output_ids)} tokens"
    return Text.assemble(text, " ", (node.reason or ("trained" if node.trained else "nothing sampled"), style))


def _row_table(node: Node) -> Table:
    call = node.call
    table = Table("column", "value", show_header=False)
    rows = {
        "call": f"{call.call_id}.{call.choice}",
        "session": call.session_id,
        "thread": call.thread_id,
        "kind, status": f"{call.kind}, {call.status}",
        "edge": node.edge + (f", shown by {node.evidence}" if node.evidence else ""),
        "parent": call.parent and f"{call.parent[0]}.{call.parent[1]}",
        "prompt": f"{call.prompt_len} tokens, {node.shared} of them the parent's path",
        "output": f"{len(call.output_ids)} tokens" + (f", {call.after_stop} after a stop" if call.after_stop else ""),
        "temperature": call.temperature,
        "weight versions": ", ".join(f"{v} [{start}:{end}]" for start, end, v in call.versions),
        "delivered": call.delivered,
        **_windows("root", call.root_window),
        **_windows("re-render", call.drift),
        "not trained because": node.reason,
    }
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    return table


def _windows(name: str, window: str | None) -> dict[str, str]:
    """What the columns root_window and drift say, one line for each of their fields."""
    return {f"{name}: {key}": str(value) for key, value in json.loads(window or "{}").items()}


def _token_table(call: Call, decode: Decode | None) -> Table:
    table = Table("", "id", "text", "logprob", title="Sampled tokens")
    for place, (token, logprob) in enumerate(zip(call.output_ids.tolist(), call.logprobs.tolist(), strict=False)):
        table.add_row(str(place), str(token), Text(text_of(token, decode)), f"{logprob:.5f}")
    return table
