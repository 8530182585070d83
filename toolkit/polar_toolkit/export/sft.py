"""Chat JSON lines for supervised fine-tuning: OpenAI's messages and tools, one line a trajectory.

Invariant: every assistant message has `weight`: 1 when the model sampled it, it is trained, and no earlier line has it
with 1; else 0. Whoever ignores the weights trains on the turns that branches share once for each branch. Text is what
the harness was given, so tokens are not kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polar_mitm.conversation import Message, ToolResult
from polar_toolkit.export.conversations import Session, sessions
from polar_toolkit.export.source import Format, Source


def write(folder: Path, source: Source) -> None:
    """Write conversations.jsonl."""
    with (folder / "conversations.jsonl").open("w") as file:
        for line in _lines(source):  # json, because text may hold half characters, which it can write
            file.write(json.dumps(line) + "\n")


FORMAT = Format("sft", "chat JSON lines with tools, for sessions of at least --min-reward", write)


def _lines(source: Source) -> Iterator[dict[str, Any]]:  # Any: JSON values
    for session in sessions(source):
        reason = _left_out(session, source.min_reward)
        if reason:
            source.tally.leave_out(reason, sum(turn.trained for turn in session.turns))
            continue
        taught: set[int] = set()
        trained = [i for i, turn in enumerate(session.turns) if turn.trained]
        for leaf in session.leaves(trained):
            fresh = {i for i in session.path(leaf) if session.turns[i].trained} - taught
            taught |= fresh
            source.tally.rows += 1
            source.tally.trained += sum(session.turns[i].trained for i in fresh)
            yield _line(session, leaf, fresh)


def _left_out(session: Session, min_reward: float | None) -> str | None:
    if min_reward is None:
        return None
    if session.reward is None:
        return "no_reward"
    return "below_min_reward" if session.reward < min_reward else None


def _line(session: Session, leaf: int, fresh: set[int]) -> dict[str, Any]:  # Any: JSON values
    from polar_mitm.tokens import plain  # seconds to import: only where text is exported

    messages: list[Message] = []
    weights: list[int] = []
    """Of each chat message: a message of several tool results becomes several."""
    for index in session.path(leaf):
        turn = session.turns[index]
        messages += [*turn.messages, turn.reply]
        weights += [0] * sum(_chat_messages(message) for message in turn.messages) + [int(index in fresh)]
    return {
        "messages": [_openai(*both) for both in zip(plain.chat(tuple(messages)), weights, strict=True)],
        "tools": plain.specs(session.turns[leaf].tools) or [],
        "trajectory_id": session.turns[leaf].name,
        "run_id": session.key[0],
        "session_id": session.key[1],
        "group_id": session.group_id,
        "reward": session.reward,
    }


def _chat_messages(message: Message) -> int:
    return max(1, sum(isinstance(part, ToolResult) for part in message.parts))


def _openai(message: dict[str, Any], weight: int) -> dict[str, Any]:  # Any: a chat message as JSON
    """A chat message of `plain` with arguments as JSON text, as OpenAI has them, and its weight."""
    if message["role"] != "assistant":
        return message
    calls = [_with_text(call) for call in message.get("tool_calls", ())]
    return message | ({"tool_calls": calls} if calls else {}) | {"weight": weight}


def _with_text(call: dict[str, Any]) -> dict[str, Any]:  # Any: JSON values
    given = call["function"]["arguments"]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": text}}
