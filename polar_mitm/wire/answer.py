"""A reply put in the order in which every protocol sends it: reasoning, text, tool calls.

Invariant: the plain and the streamed form of an answer are both made from one `Answer`, so they cannot differ. This
module knows no protocol.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from polar_mitm.conversation import Reasoning, Reply, Text, ToolCall
from polar_mitm.wire.dialect import Kind


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reply says, by kind; parts of one kind are joined."""

    reasoning: str
    text: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, reply: Reply) -> Answer:
        """The answer that a reply gives."""
        return cls(
            "".join(part.text for part in reply.parts if isinstance(part, Reasoning)),
            "".join(part.text for part in reply.parts if isinstance(part, Text)),
            tuple(part for part in reply.parts if isinstance(part, ToolCall)),
        )


class Sent:
    """What a stream has sent so far, by kind."""

    def __init__(self) -> None:
        self._sent: dict[Kind, str] = {"reasoning": "", "text": ""}

    def __getitem__(self, kind: Kind) -> str:
        return self._sent[kind]

    def add(self, kind: Kind, text: str) -> None:
        """Note a delta. Raises ValueError for reasoning after text, which no protocol can order."""
        if kind == "reasoning" and self._sent["text"]:
            raise ValueError(f"reasoning {text[:40]!r} after text was streamed")
        self._sent[kind] += text

    def rest(self, kind: Kind, whole: str) -> str:
        """What of `whole` was not sent yet. Raises ValueError when the deltas were no prefix of it."""
        sent = self._sent[kind]
        if not whole.startswith(sent):
            raise ValueError(f"the streamed {kind} {sent[-40:]!r} is no prefix of the reply's {whole[:40]!r}")
        return whole[len(sent) :]


def arguments_value(arguments: str) -> Any:  # Any: JSON
    """A tool call's arguments as a JSON value; what is not strict JSON, or a JSON string, stays the text it is.

    So a string among values always means raw text, and reading the value back gives equal arguments.
    """
    try:
        value = json.loads(arguments)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):  # RecursionError: nested thousands deep; the harness gets the text
        return arguments
    return arguments if isinstance(value, str) else value
