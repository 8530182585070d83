"""The steps of an ATIF 1.8 trajectory: messages and replies of a path of turns, numbered from 1.

Invariant: a reply that an earlier trajectory of the session has is marked `is_copied_context` and carries no tokens, so
over a session each sampled token stands once. Tool results are observations of the step that made the call. This module
does not know how trajectories hang together (atif.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from polar_mitm.conversation import Message, Reasoning, ToolCall, ToolResult, canonical, joined_text
from polar_toolkit.export.conversations import Session, Turn

Step = dict[str, Any]  # Any: JSON values
_SOURCES = {"system": "system", "user": "user", "assistant": "agent", "tool": "system"}


@dataclass(slots=True)
class Seen:
    """What earlier trajectories of a session hold."""

    turns: set[int] = field(default_factory=set)
    messages: set[str] = field(default_factory=set)
    """In canonical form."""


def steps_of(session: Session, path: Sequence[int], seen: Seen) -> list[Step]:
    """The steps of a path of turns; adds what they hold to `seen`."""
    made, told = _Steps(), list[str]()
    for index in path:
        turn, copied = session.turns[index], index in seen.turns
        for message in turn.messages:
            text = canonical(message)
            told.append(text)
            made.say(message, copied=copied or (turn.parent < 0 and text in seen.messages))
        made.answer(turn, copied=copied)
        told.append(canonical(turn.reply))
    seen.turns |= set(path)
    seen.messages |= set(told)
    return made.steps


@dataclass(slots=True)
class _Steps:
    steps: list[Step] = field(default_factory=list)
    acted: Step | None = None
    """The last step of the agent."""

    def say(self, message: Message, *, copied: bool) -> None:
        """Add a message of a request; a reply that it quotes was not sampled here and so counts as copied."""
        results = [part for part in message.parts if isinstance(part, ToolResult)]
        if results:
            self._observe(results, copied=copied)
        elif message.role == "assistant":
            self._add("agent", _said(message), copied=True)
        else:
            self._add(_SOURCES[message.role], {"message": joined_text(message)}, copied=copied)

    def answer(self, turn: Turn, *, copied: bool) -> None:
        """Add a sampled reply, with its tokens unless an earlier trajectory has them."""
        about = {} if copied else _sampled(turn)
        self._add("agent", {"model_name": turn.model, **_said(turn.reply), **about}, copied=copied)

    def _add(self, source: str, fields: Step, *, copied: bool) -> Step:
        step = {"step_id": len(self.steps) + 1, "source": source, **fields}
        if copied:
            step["is_copied_context"] = True
        self.steps.append({name: value for name, value in step.items() if value is not None})
        if source == "agent":
            self.acted = self.steps[-1]
        return self.steps[-1]

    def _observe(self, results: Iterable[ToolResult], *, copied: bool) -> None:
        step = self.acted or self._add("system", {"message": ""}, copied=copied)
        observed = step.setdefault("observation", {"results": []})["results"]
        asked = [call["tool_call_id"] for call in step.get("tool_calls", ())]
        for result in results:
            open_ids = [id for id in asked if id not in {entry.get("source_call_id") for entry in observed}]
            observed.append(_observed(result, open_ids))


def _observed(result: ToolResult, open_ids: list[str]) -> dict[str, Any]:  # Any: JSON values
    """An observation of the call that it names, else of the first call without one: harnesses may change ids."""
    source = result.call_id if result.call_id in open_ids else next(iter(open_ids), None)
    extra = {"is_error": True} if result.is_error else {}
    extra |= {} if source == result.call_id else {"tool_call_id": result.call_id}
    entry = {"source_call_id": source, "content": result.text, "extra": extra or None}
    return {name: value for name, value in entry.items() if value is not None}


def _said(message: Message) -> Step:
    calls = [_tool_call(part) for part in message.parts if isinstance(part, ToolCall)]
    reasoning = "".join(part.text for part in message.parts if isinstance(part, Reasoning))
    return {"message": joined_text(message), "reasoning_content": reasoning or None, "tool_calls": calls or None}


def _tool_call(call: ToolCall) -> dict[str, Any]:  # Any: JSON values
    entry = {"tool_call_id": call.id, "function_name": call.name, "arguments": _arguments(call)}
    return entry | ({"extra": {"custom": True}} if call.custom else {})


def _arguments(call: ToolCall) -> dict[str, Any]:  # Any: JSON values
    """The arguments as an object, which ATIF wants; anything else under the one name `input`."""
    try:
        given = call.arguments if call.custom else json.loads(call.arguments)
    except ValueError:  # a harness may send back arguments that are no JSON
        given = call.arguments
    return given if isinstance(given, dict) else {"input": given}


def _sampled(turn: Turn) -> Step:
    call = turn.call
    return {
        "timestamp": datetime.fromtimestamp(turn.began_ns / 1e9, UTC).isoformat() if turn.began_ns else None,
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": call.prompt_len,
            "completion_tokens": len(call.output_ids) + call.after_stop,
            "completion_token_ids": call.output_ids.tolist(),
            "logprobs": call.logprobs.tolist(),
            **({} if turn.cached_tokens is None else {"cached_tokens": turn.cached_tokens}),
        },
        "extra": {
            "call_id": call.call_id,
            "choice": call.choice,
            "kind": call.kind,
            "trained": turn.node.trained,
            "reason": turn.node.reason,
            "weight_versions": [version for _, _, version in call.versions],
        },
    }
