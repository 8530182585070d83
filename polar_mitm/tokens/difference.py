"""The bridge for chat templates without a typed renderer: what the template writes after an assistant's turn.

Invariant: the bridge is used only for what it was seen to do right on scripted steps (`find`): after texts alone, or
after calls too. It renders a stand-in for the reply with the same calls and the new messages, cuts behind the end of
the reply and encodes only the remainder; the sampled ids are never rendered again. It renders over a one-message
history, or, for templates that look back, over the request's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from polar_mitm.conversation import Message, Text, Tool, ToolCall
from polar_mitm.tokens import plain, probe, script
from polar_mitm.tokens.chat_template import MARK, ChatTemplate, common

_STEM = (Message("user", (Text("?"),)),)


@dataclass(frozen=True, slots=True)
class Difference:
    """The bridge of one template."""

    chat: ChatTemplate
    stops: frozenset[int]
    after_calls: bool = False
    """Whether it may extend a reply that calls; a reply of text it always may."""
    looks_back: bool = False
    """Whether the template must see the whole history to say what follows; costs a rendering of it, no encoding."""

    def extend(
        self, output: list[int], history: tuple[Message, ...], new: int, tools: tuple[Tool, ...]
    ) -> list[int] | None:
        """The ids that follow a sampled `output` when history[new:] is said after it; None when that is not known.

        `history[new - 1]` is the reply that was sampled. Raises whatever the template raises.
        """
        reply = history[new - 1]
        calls = any(isinstance(part, ToolCall) for part in reply.parts)
        if calls and not self.after_calls:
            return None
        closed, after = self._rests(history, new, tools)
        if closed is None or after is None:
            return None
        closed_ids, ids = self.chat.encode(closed), self.chat.encode(after)
        end = self._end(closed_ids, ids)
        if output and output[-1] in self.stops:
            return ids[end + (end < len(ids) and ids[end] == output[-1]) :]  # GLM stops at the next turn's beginning
        if calls:  # of which the sample holds everything but the end
            return ids[max(0, end - 1) if self.chat.closings else end :]
        held = (n for n in range(end, 0, -1) if output[-n:] == ids[:n])  # Cohere ends a reply by two markers
        return ids[next(held, 0) :]

    def _end(self, closed: list[int], after: list[int]) -> int:
        """Behind which id the reply's turn is over, in what follows the mark."""
        shared, ends = common(closed, after), {*self.stops, *self.chat.closings}
        places = [place + 1 for place, token in enumerate(closed[:shared]) if token in ends]
        if places:
            return places[-1]
        parted = shared < min(len(closed), len(after)) and {closed[shared], after[shared]} <= ends
        return shared + 1 if parted else shared

    def _rests(self, history: tuple[Message, ...], new: int, tools: tuple[Tool, ...]) -> tuple[str | None, str | None]:
        """What the template writes after the stand-in: when nothing follows, and when the new messages do."""
        stem = self.chat.chat(history[: new - 1] if self.looks_back else _STEM)
        said, specs = [*stem, self._stand_in(history[new - 1])], plain.specs(tools)
        base = self.chat.head(stem, specs)
        closed = self.chat.text(said, specs, prompt=False)
        after = self.chat.text([*said, *self.chat.chat(history, new)], specs, prompt=True)
        marks = closed.count(MARK, len(base))
        if not marks:
            return None, None
        return _behind(closed, base, marks), _behind(after, base, marks)

    def _stand_in(self, reply: Message) -> dict[str, Any]:  # Any: a chat message as JSON
        """The reply's calls with a marked argument, or a marked text: no more of it shapes what follows."""
        marked = json.dumps({"value": MARK})
        calls = tuple(replace(p, arguments=marked, custom=False) for p in reply.parts if isinstance(p, ToolCall))
        return self.chat.chat((Message("assistant", calls or (Text(MARK),)),))[0]


def find(chat: ChatTemplate, stops: frozenset[int]) -> Difference | None:
    """The bridge that holds on most scripted steps, None when not even a text can be extended."""
    bridges = [Difference(chat, stops, calls, back) for calls in (True, False) for back in (False, True)]
    rendered = [probe.render(chat, step) for step in (*script.DECISIVE_TEXT, *script.DECISIVE_CALLS)]
    seen = [step.ended(stops) for step in rendered if isinstance(step, probe.Rendered)]
    if not seen or seen[0].step not in script.DECISIVE_TEXT or not _keeps_its_head(chat, seen[0].step):
        return None
    return next((bridge for bridge in bridges if _holds(bridge, seen)), None)


def extended(bridge: Difference, taken: probe.Taken) -> list[int] | None:
    """A scripted step's bridged prompt."""
    step = taken.step
    try:
        more = bridge.extend(taken.output, step.request, len(step.history) + 1, step.tools)
    except Exception:  # noqa: BLE001 - jinja templates raise anything; there is then no bridge
        return None
    return None if more is None else [*taken.own, *more]


def _holds(bridge: Difference, seen: list[probe.Taken]) -> bool:
    asked = [t for t in seen if t.step in script.DECISIVE_TEXT or bridge.after_calls]
    if bridge.after_calls and not any(t.step == script.CALL for t in asked):
        return False
    made = [(t, extended(bridge, t)) for t in asked]
    return all(ids is not None and probe.is_faithful(bridge.chat, t, ids, bridge.stops) for t, ids in made)


def _keeps_its_head(chat: ChatTemplate, step: script.Step) -> bool:
    """Whether a longer history begins as the shorter one did: a template may write a date there, but not a count."""
    head = chat.head(chat.chat(step.history), plain.specs(step.tools))
    return chat.render(step.request, step.tools).startswith(head)


def _behind(text: str, base: str, marks: int) -> str | None:
    """What follows the last mark of the stand-in; None when the text does not begin as before the reply."""
    if not text.startswith(base):
        return None  # a new message changed what stands before the reply
    pieces = text[len(base) :].split(MARK, marks)
    return pieces[marks] if len(pieces) > marks else None
