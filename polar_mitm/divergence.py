"""How one context leaves another: the drift of a plain re-render, and where a root departs from an earlier call.

Invariant: a class is given only when what was compared shows it; everything else is "other". Windows are decoded with
special tokens, about 24 tokens on each side of the first difference. This module renders nothing and keeps nothing; it
does not say whether a call may be continued: `tips` does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from polar_mitm.conversation import Message, Reasoning, Text, Tool, ToolCall, ToolResult, canonical
from polar_mitm.thinking import is_trimmed, thought

Tokens = NDArray[np.int32]
DriftClass = Literal["reasoning", "white_space", "arguments", "retokenized", "template", "other"]
DepartureClass = Literal["reminder", "edited", "removed", "tools", "compaction", "other"]

_WINDOW = 24
"""Tokens on each side of a difference."""
_CHARACTERS = 4 * _WINDOW
_TELLING = 8
"""So many characters behind a difference must stand in a window of tokens for it to show the difference."""
_LEAST_LINE = 20
"""Characters of a summary's line that no other message holds by chance."""
_REASONING_MARKS = (
    ("<think>", "</think>"),
    ("<|channel|>analysis", "<|end|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
_REASONING = re.compile(
    "|".join(f"{re.escape(start)}(.*?)(?:{re.escape(end)}|\\Z)" for start, end in _REASONING_MARKS), re.DOTALL
)
_REMINDER = re.compile(r"\s*<(system[-_]reminder)>.*?</\1>\s*", re.DOTALL)  # Claude Code 2.1.332
_JSON = json.JSONDecoder()


class Decoder(Protocol):
    """What is needed of a model's tokenizer."""

    stop_ids: tuple[int, ...]

    def decode(self, ids: Tokens, /) -> str:
        """Text of ids, special tokens included."""
        ...

    def marks(self, ids: Tokens, /) -> list[int]:
        """The places of the added tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Drift:
    """Where a plain re-render first leaves the prompt that was sent."""

    kind: DriftClass
    at: int
    """How many leading tokens they share."""
    sampled: str
    """The prompt around that place."""
    rendered: str
    """The re-render around it."""

    def json(self) -> str:
        """As the column `drift` holds it."""
        return _json(asdict(self))


@dataclass(frozen=True, slots=True)
class Departure:
    """Where a root with a history first leaves the nearest earlier call."""

    kind: DepartureClass
    at: int
    """How many leading tokens they share."""
    call: str
    """The earlier call."""
    was: str
    now: str
    restored: int = 0
    """Replies whose reasoning, which the harness left out, was put back into the prompt."""

    def json(self) -> str:
        """As the column `root_window` holds it."""
        return _json(asdict(self))


def _json(fields: dict[str, Any]) -> str:  # Any: JSON
    return json.dumps({"class": fields.pop("kind"), **fields})


def shared_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _window(decoder: Decoder, ids: Tokens, at: int) -> str:
    return decoder.decode(ids[max(0, at - _WINDOW) : at + _WINDOW])


# --- drift --------------------------------------------------------------------------------------------------------


def drift(decoder: Decoder, prompt: Tokens, rendered: Tokens) -> Drift | None:
    """How `rendered`, a plain re-render of the same request, first leaves `prompt`; None when they are equal.

    The turn in which they part is compared, from the end of the turn before it to its own end.
    """
    at = shared_prefix(prompt, rendered)
    if at == len(prompt) == len(rendered):
        return None
    turns = _turn(decoder, prompt, at), _turn(decoder, rendered, at)
    kind = _drift_class(decoder, *turns)
    return Drift(kind, at, _window(decoder, prompt, at), _window(decoder, rendered, at))


def _turn(decoder: Decoder, ids: Tokens, at: int) -> Tokens:
    """The turn that holds the place `at`, its end included."""
    ends = np.flatnonzero(np.isin(ids, decoder.stop_ids))
    index = int(np.searchsorted(ends, at))
    start = int(ends[index - 1]) + 1 if index else 0
    return ids[start : int(ends[index]) + 1 if index < len(ends) else len(ids)]


def _drift_class(decoder: Decoder, sampled: Tokens, rendered: Tokens) -> DriftClass:
    a, b = decoder.decode(sampled), decoder.decode(rendered)
    if a == b:
        return "retokenized"
    if _bare(a) == _bare(b):
        return "white_space"
    thought, shown = _bare(_thought(a)), _bare(_thought(b))
    if thought != shown and shown in thought:
        return "reasoning"
    if _bare(_with_canonical_json(a)) == _bare(_with_canonical_json(b)):
        return "arguments"
    return "template" if _unmarked(decoder, sampled) == _unmarked(decoder, rendered) else "other"


def _bare(text: str) -> str:
    """Without white space."""
    return "".join(text.split())


def _thought(text: str) -> str:
    """The reasoning in the text of a turn."""
    return "".join("".join(filter(None, found.groups())) for found in _REASONING.finditer(text))


def _with_canonical_json(text: str) -> str:
    """The text with every JSON object in it in one form: in a turn of the model, only its calls are written anew."""
    pieces: list[str] = []
    place = 0
    while (start := text.find("{", place)) >= 0:
        try:
            value, end = _JSON.raw_decode(text, start)
        except (ValueError, RecursionError):  # no JSON from here: the brace is text
            pieces.append(text[place : start + 1])
            place = start + 1
            continue
        pieces += [text[place:start], json.dumps(value, sort_keys=True, ensure_ascii=False)]
        place = end
    return "".join([*pieces, text[place:]])


def _unmarked(decoder: Decoder, ids: Tokens) -> str:
    """What a turn says besides the family's markers and white space."""
    return _bare(decoder.decode(np.delete(ids, decoder.marks(ids))))


# --- departures ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Context:
    """What was said in a call, and the tokens of it."""

    tokens: Tokens
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]


def replaces_history(messages: Sequence[Message], summaries: Sequence[str]) -> bool:
    """Whether one of the messages holds a summary: it stands for a history from now on."""
    return any(_holds(message, summary) for message in messages for summary in summaries)


def departure(
    decoder: Decoder, call: str, was: Context, now: Context, *, summaries: Sequence[str] = (), restored: int = 0
) -> Departure:
    """How a request (`now`) leaves an earlier call with its reply (`was`).

    `summaries` are the replies of the session's compactions: a message that holds one replaced history.
    """
    at = shared_prefix(was.tokens, now.tokens)
    kind, place = _departure_class(was.messages, now.messages, summaries)
    windows = _window(decoder, was.tokens, at), _window(decoder, now.tokens, at)
    if kind is not None:
        windows = _telling(windows, _texts(was.messages, now.messages, place))
    elif was.tools != now.tools:
        kind, windows = "tools", _tools(was.tools, now.tools)
    return Departure(kind or "other", at, call, *windows, restored=restored)


def _departure_class(
    was: tuple[Message, ...], now: tuple[Message, ...], summaries: Sequence[str]
) -> tuple[DepartureClass | None, int]:
    """The class by the first differing message, and its place; None when the history goes on from all that was."""
    before, after = [*map(canonical, was)], [*map(canonical, now)]
    same = (
        a == b and is_trimmed(thought(new.parts), thought(old.parts))
        for a, b, old, new in zip(before, after, was, now, strict=False)
    )
    place = sum(1 for _ in takewhile(bool, same))
    if place == len(before):
        return None, place
    if place == len(after):
        return "removed", place
    old, new = was[place], now[place]
    if replaces_history([new], summaries):
        return "compaction", place
    if _reminded(was, now, place):
        return "reminder", place
    if after[place] in before[place + 1 :] or _begins_with(new, before[place]):
        return "removed", place
    return ("edited" if old.role == new.role else "other"), place


def _holds(message: Message, summary: str) -> bool:
    """Whether a message of the harness holds a summary: all of it, or most of its long lines.

    Claude Code 2.1.332 takes off the tags around it.
    """
    if message.role == "assistant" or not summary.strip():
        return False
    text, lines = _text(message), [line.strip() for line in summary.splitlines()]
    long = [line for line in lines if len(line) >= _LEAST_LINE]
    return summary.strip() in text or 2 * sum(line in text for line in long) > len(long)


def _reminded(was: tuple[Message, ...], now: tuple[Message, ...], place: int) -> bool:
    """Whether only reminders were added, changed or taken away: messages of nothing else, or blocks inside one."""
    old, new = was[place], now[place]
    if _is_reminder(new) and place + 1 < len(now) and canonical(now[place + 1]) == canonical(old):
        return True
    if _is_reminder(old) and place + 1 < len(was) and canonical(was[place + 1]) == canonical(new):
        return True
    reminds = any(_REMINDER.search(_text(message)) for message in (old, new))
    return old.role == new.role != "assistant" and reminds and _unreminded(old) == _unreminded(new)


def _is_reminder(message: Message) -> bool:
    text = _text(message)
    return message.role != "assistant" and bool(text) and not _REMINDER.sub("", text)


def _unreminded(message: Message) -> list[tuple[str, str]]:
    """What each text of a message says without the reminders in it."""
    texts = [(type(p).__name__, p.text) for p in message.parts if isinstance(p, (Text, ToolResult))]
    return [(kind, said) for kind, text in texts if (said := _REMINDER.sub("", text).strip()) or kind == "ToolResult"]


def _begins_with(message: Message, reply: str) -> bool:
    """Whether a reply stands at the head of an assistant message: what stood between it and the next one is gone."""
    if message.role != "assistant":
        return False
    heads = (message.parts[:n] for n in range(1, len(message.parts)))
    return any(canonical(Message("assistant", head)) == reply for head in heads)


def _texts(was: tuple[Message, ...], now: tuple[Message, ...], place: int) -> tuple[str, str]:
    """What the differing messages say; their reasoning when they say the same."""
    old, new = (messages[place] if place < len(messages) else Message("user", ()) for messages in (was, now))
    if canonical(old) == canonical(new):
        return thought(old.parts), thought(new.parts)
    return _text(old), _text(new)


def _text(message: Message) -> str:
    shown: list[str] = []
    for part in message.parts:
        if isinstance(part, ToolCall):
            shown.append(f"{part.name}({part.arguments})")
        elif not isinstance(part, Reasoning):
            shown.append(part.text)
    return "\n\n".join(shown)


def _telling(windows: tuple[str, str], texts: tuple[str, str]) -> tuple[str, str]:
    """The windows when they show the difference of the texts, else the texts around it.

    The tokens part earlier where the template writes what is equal in another way, such as older reasoning.
    """
    pairs = zip(*texts, strict=False)
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if all(text[place : place + _TELLING] in window for text, window in zip(texts, windows, strict=True)):
        return windows
    was, now = (text[max(0, place - _CHARACTERS) : place + _CHARACTERS] for text in texts)
    return was, now


def _tools(was: tuple[Tool, ...], now: tuple[Tool, ...]) -> tuple[str, str]:
    """Which tools went or changed, and which came or changed."""
    old, new = {_name(tool): tool for tool in was}, {_name(tool): tool for tool in now}
    changed = [name for name in old if name in new and old[name] != new[name]]
    gone, come = [name for name in old if name not in new], [name for name in new if name not in old]
    if not (changed or gone or come):
        return f"order: {', '.join(old)}", f"order: {', '.join(new)}"
    return _listed(removed=gone, changed=changed), _listed(added=come, changed=changed)


def _name(tool: Tool) -> str:
    return f"{tool.namespace}.{tool.name}" if tool.namespace else tool.name


def _listed(**names: list[str]) -> str:
    return "; ".join(f"{what}: {', '.join(each)}" for what, each in names.items() if each)
