"""Scripted conversations, each one step: a history, the reply that was sampled to it, and what the harness adds.

Invariant: the first word of every text is found in no other text of its step, so where a message ended up can be told
from a rendering alone. Which steps decide about a bridge is said here (`TEXT`, `CALLS`); the others show what a
template does with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polar_mitm.conversation import Message, Reasoning, Text, Tool, ToolCall, ToolResult

LOOK = Tool(
    "look",
    "Look at a path.",
    '{"type":"object","properties":{"path":{"type":"string"}},"required":["path"]}',
)
_SYSTEM = Message("system", (Text("Be brief."),))
_ASKED = Message("user", (Text("Compare both folders."),))
_AGAIN = Message("user", (Text("Now what\n  remains?"),))
_RESULT = Message("tool", (ToolResult("call_00001", "alpha.txt\nbeta.txt\n"),))
_RESULTS = Message("tool", (ToolResult("call_00001", "gamma.txt"), ToolResult("call_00002", "nothing here")))
_REMINDER = Message("system", (Text("Remember the limit."),))


def _call(number: int = 1, path: str = "src/main") -> ToolCall:
    return ToolCall(f"call_{number:05}", "look", f'{{"path": "{path}"}}')


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a conversation."""

    name: str
    history: tuple[Message, ...]
    reply: Message
    new: tuple[Message, ...]
    tools: tuple[Tool, ...] = (LOOK,)
    cut: bool = False
    """Whether the reply is sampled without its end of turn, as a length ending leaves it."""

    @property
    def request(self) -> tuple[Message, ...]:
        """The whole history of the next request."""
        return (*self.history, self.reply, *self.new)


def _said(*parts: Text | Reasoning | ToolCall) -> Message:
    return Message("assistant", parts)


_OPEN = (_SYSTEM, _ASKED)
_TEXT = Text("Hello, you.")
_THOUGHT = Reasoning("Hm, folders.")
TEXT = Step("text, then a user", _OPEN, _said(_TEXT), (_AGAIN,), ())
CALL = Step("a call, then its result", _OPEN, _said(_call()), (_RESULT,))
SECOND = Step("a second call", (*_OPEN, _said(_call(7, "doc")), Message("tool", (ToolResult("call_00007", "delta"),))),
              _said(_call()), (_RESULT,))  # fmt: skip
ANSWERED = Step("text after a call, then a user", (*_OPEN, _said(_call()), _RESULT), _said(_TEXT), (_AGAIN,))
SPOKEN_CALL = Step("text and a call", _OPEN, _said(_TEXT, _call()), (_RESULT,))
PARALLEL = Step("two calls, then both results", _OPEN, _said(_call(), _call(2, "tests")), (_RESULTS,))
THOUGHT = Step("reasoning and text, then a user", _OPEN, _said(_THOUGHT, _TEXT), (_AGAIN,), ())
THOUGHT_CALL = Step("reasoning and a call", _OPEN, _said(_THOUGHT, _call()), (_RESULT,))
OLD_THOUGHT = Step("text long after reasoning", (*_OPEN, _said(_THOUGHT, _call()), _RESULT), _said(_TEXT), (_AGAIN,))
PLAIN = Step("no system message", (_ASKED,), _said(_TEXT), (_AGAIN,), ())
WITH_USER = Step("a result and a user at once", _OPEN, _said(_call()), (_RESULT, _AGAIN))
CUT_TEXT = replace(TEXT, name="a cut reply, then a user", cut=True)
CUT_CALL = replace(CALL, name="a cut call, then its result", cut=True)
MORE = (
    PLAIN,
    WITH_USER,
    Step("a reminder before the user", _OPEN, _said(_TEXT), (_REMINDER, _AGAIN), ()),
    Step("a reminder after a result", _OPEN, _said(_call()), (_RESULT, _REMINDER)),
    Step("two users in a row", _OPEN, _said(_TEXT), (_AGAIN, Message("user", (Text("Hurry, friend."),))), ()),
    Step("unicode", _OPEN, _said(Text("Voilà 北京 🧭.")), (Message("user", (Text("Ünïcode 日本 \u200d🏽"),)),), ()),
    Step("odd white space", _OPEN, _said(Text("Spaces  and\n\n\ttabs.")),
         (Message("user", (Text("tail \n\n"),)), ), ()),
    Step("white space around the reply", _OPEN, _said(Text("\n\n  Padded. \n")), (_AGAIN,), ()),
    Step("an empty reply", _OPEN, _said(), (_AGAIN,), ()),
    CUT_TEXT,
    CUT_CALL,
)  # fmt: skip
DECISIVE_TEXT = (TEXT, PLAIN, CUT_TEXT)
"""What a bridge must hold, as far as the template says it, to be used at all: Gemma refuses a system message."""
DECISIVE_CALLS = (CALL, SECOND, ANSWERED, PARALLEL, WITH_USER, CUT_CALL)
"""What it must hold, as far as the template says it, to be used after calls."""
SAID = (*DECISIVE_TEXT, *DECISIVE_CALLS, SPOKEN_CALL, THOUGHT, THOUGHT_CALL, OLD_THOUGHT)
ALL = tuple(dict.fromkeys((*SAID, *MORE)))
