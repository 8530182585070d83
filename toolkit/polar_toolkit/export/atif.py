"""ATIF 1.8 documents: what the agent of each session saw, said and did, with the sampled tokens of its steps.

Invariant: a document is one path of calls of the main agent; where its history was rewritten (compaction, an edited
turn) the next document goes on, and what it repeats is marked `is_copied_context`. Sub-agents and the writing of
summaries are embedded in the document that called them. Retries that nothing continues, aborted and auxiliary calls
are left out, and counted in `extra` of the session's first document.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from polar_mitm.conversation import joined_text
from polar_toolkit.export.conversations import Session, Turn, sessions
from polar_toolkit.export.source import Format, Source
from polar_toolkit.export.steps import Seen, Step, steps_of

SCHEMA_VERSION = "ATIF-v1.8"
_KINDS = ("agent", "subagent", "compaction")
_LEAST_PROMPT = 12
"""Characters of a tool's argument that can be the whole prompt of a sub-agent."""
Document = dict[str, Any]  # Any: JSON values


def write(folder: Path, source: Source) -> None:
    """Write one JSON file a document, named by its trajectory_id."""
    for session in sessions(source):
        for document in documents(session, source):
            (folder / _file(document)).write_text(json.dumps(document) + "\n")


FORMAT = Format("atif", "ATIF 1.8 documents, one file each, sub-agents embedded", write)


def documents(session: Session, source: Source) -> list[Document]:
    """The documents of a session, in order; counts into `source.tally`."""
    seen, main, others = Seen(), list[tuple[int, Document]](), list[tuple[list[int], Document]]()
    for leaf in _leaves(session):
        path = session.path(leaf)
        document = _document(session, path, seen, source)
        if session.turns[leaf].call.kind == "agent":
            main.append((leaf, document))
        else:
            others.append((path, document))
    _chain(session, main)
    for path, document in others if main else ():
        _embed(main, session.turns[path[0]], path, document)
    tops = [document for _, document in main or others]
    if tops:
        tops[0]["extra"]["left_out"] = dict(Counter(filter(None, map(_left_out, session.turns))))
    return tops


def _left_out(turn: Turn) -> str | None:
    """Why a call is in no document."""
    call, reason = turn.call, turn.node.reason
    if call.status != "completed" or not turn.node.intact:
        return reason or call.status
    if call.kind not in _KINDS:
        return call.kind
    return reason if reason == "superseded" else None


def _leaves(session: Session) -> list[int]:
    """The last call of each document: one that no other call of its kind continues."""
    kept = [i for i, turn in enumerate(session.turns) if _left_out(turn) is None]
    kinds = ([i for i in kept if session.turns[i].call.kind == kind] for kind in _KINDS)
    return sorted(leaf for some in kinds for leaf in session.leaves(some))


def _document(session: Session, path: Sequence[int], seen: Seen, source: Source) -> Document:
    from polar_mitm.tokens import plain  # seconds to import: only where text is exported

    root, leaf = session.turns[path[0]], session.turns[path[-1]]
    source.tally.rows += 1
    source.tally.trained += sum(session.turns[i].trained for i in path if i not in seen.turns)
    steps = steps_of(session, path, seen)
    own = [step for step in steps if not step.get("is_copied_context")]
    name, _, version = (root.user_agent or "unknown").partition(" ")[0].partition("/")
    document: Document = {
        "schema_version": SCHEMA_VERSION,
        "session_id": session.key[1],
        "trajectory_id": leaf.name,
        "agent": _without_none(
            {
                "name": name,
                "version": version or "unknown",
                "model_name": root.model,
                "tool_definitions": plain.specs(root.tools),
            }
        ),
        "steps": steps,
        "final_metrics": _totals(own),
        "notes": "final_metrics leaves out steps marked is_copied_context." if len(own) < len(steps) else None,
        "extra": {"run_id": session.key[0], "group_id": session.group_id, "reward": session.reward},
    }
    return _without_none(document)


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:  # Any: JSON values
    return {name: value for name, value in fields.items() if value is not None}


def _totals(steps: Sequence[Step]) -> dict[str, int]:
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    return {
        "total_prompt_tokens": sum(entry["prompt_tokens"] for entry in metrics),
        "total_completion_tokens": sum(entry["completion_tokens"] for entry in metrics),
        "total_cached_tokens": sum(entry.get("cached_tokens", 0) for entry in metrics),
        "total_steps": len(steps),
    }


def _chain(session: Session, main: Sequence[tuple[int, Document]]) -> None:
    """Each document of a thread points at the next one's file."""
    threads: dict[str | None, list[Document]] = {}
    for leaf, document in main:
        threads.setdefault(session.turns[leaf].call.thread_id, []).append(document)
    for before, after in (pair for thread in threads.values() for pair in pairwise(thread)):
        before["continued_trajectory_ref"] = _file(after)


def _file(document: Document) -> str:
    return f"{document['trajectory_id']}.json"


def _embed(main: Sequence[tuple[int, Document]], root: Turn, path: Sequence[int], document: Document) -> None:
    """Put it into the document whose tool call asked for it, else into the one that it continues or interrupts."""
    tops = [top for _, top in main]
    asked = next(((top, step, call) for top, step, call in _tool_calls(tops) if _asks_for(call, root)), None)
    if asked is None:
        top = next((top for end, top in main if end in path or end > path[-1]), tops[-1])
    else:
        top, step, call = asked
        _refer(step, call, document)
    top.setdefault("subagent_trajectories", []).append(document)


def _tool_calls(tops: Sequence[Document]) -> Iterator[tuple[Document, Step, dict[str, Any]]]:  # Any: JSON values
    steps = ((top, step) for top in tops for step in top["steps"] if not step.get("is_copied_context"))
    return ((top, step, call) for top, step in steps for call in step.get("tool_calls", ()))


def _asks_for(call: dict[str, Any], root: Turn) -> bool:  # Any: JSON values
    """Whether an argument of the call is in what the sub-agent was told first."""
    told = next((joined_text(message) for message in root.messages if message.role == "user"), "")
    texts = [value.strip() for value in call["arguments"].values() if isinstance(value, str)]
    return any(len(text) >= _LEAST_PROMPT and text in told for text in texts)


def _refer(step: Step, call: dict[str, Any], document: Document) -> None:  # Any: JSON values
    ref = {"trajectory_id": document["trajectory_id"], "session_id": document["session_id"]}
    results = step.setdefault("observation", {"results": []})["results"]
    entry = next((entry for entry in results if entry.get("source_call_id") == call["tool_call_id"]), None)
    if entry is None:
        entry = {"source_call_id": call["tool_call_id"]}
        results.append(entry)
    entry.setdefault("subagent_trajectory_ref", []).append(ref)
