"""One scripted step through a chat template: what would be sampled, what a server would render next, and what a bridge
makes of it.

Invariant: a bridge is judged by the template's own text alone. It is *faithful* when it keeps the sampled ids and adds
exactly what the template writes after the reply; it is *canonical* when the template, too, leaves the reply as sampled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from polar_mitm.conversation import Message, Reasoning, Text, ToolCall, ToolResult
from polar_mitm.tokens.chat_template import ChatTemplate, common
from polar_mitm.tokens.script import Step

_THINK, _THOUGHT = "<think>", "</think>\n\n"
_TAIL = 5
"""Characters of a reply by which its end is known again in a rendering."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A step as the template says it."""

    step: Step
    prompt: list[int]
    sample: list[int]
    """The reply as it would be sampled, and what the template writes behind it when nothing follows."""
    next: int | None
    """The id that the template writes after the reply when something follows: GLM ends a turn so."""
    canonical: list[int]
    """What a plain render of the next request gives."""

    def ended(self, stops: frozenset[int]) -> Taken:
        """The step for a model that stops at these ids."""
        first = next((place for place, token in enumerate(self.sample) if token in stops), None)
        if first is not None:
            output = self.sample[: first + (not self.step.cut)]
        elif self.next in stops and not self.step.cut:
            output = [*self.sample, self.next]
        else:
            output = self.sample
        return Taken(self.step, self.prompt, output, self.canonical)


@dataclass(frozen=True, slots=True)
class Taken:
    """A step with the reply as it is sampled, its end of turn included unless the step is cut."""

    step: Step
    prompt: list[int]
    output: list[int]
    canonical: list[int]
    """What a plain render of the next request gives."""

    @property
    def own(self) -> list[int]:
        """What a bridge must keep."""
        return [*self.prompt, *self.output]

    @property
    def append_only(self) -> bool:
        """Whether the template leaves prompt and reply, as sampled, at the beginning of the next prompt."""
        return self.canonical[: len(self.own)] == self.own


def render(chat: ChatTemplate, step: Step) -> Rendered | str:
    """The step under a template; or why it cannot be taken: what the template refuses or does not say."""
    opening = step.history[: next(i for i, m in enumerate(step.history) if m.role == "user") + 1]
    try:
        before, after = chat.render(step.history, step.tools), chat.render(step.request, step.tools)
        asked = chat.render(opening, step.tools)
        closed = chat.render((*opening, step.reply), step.tools, closed=True)
        then = chat.render((*opening, step.reply, *step.new), step.tools)
    except Exception as error:  # noqa: BLE001 - jinja templates raise anything; the step is then told as refused
        return f"refused: {str(error).strip() or type(error).__name__}"
    history = [w for m in step.history for w in _values(m)]
    unsaid = [w for w in (*history, *_words(step)) if w not in after] or [
        w for w in _spoken(step.reply) if w not in closed
    ]
    if unsaid:
        return f"not said by the template: {unsaid[0]!r}"
    reasons = any(isinstance(part, Reasoning) for part in step.reply.parts)
    sample = ("" if reasons else _kept(asked, closed, then)) or _sample(asked, closed)
    following = _following(closed, then, (_spoken(step.reply) or [closed])[-1])
    next_id = next(iter(chat.encode(following)), None)
    return Rendered(step, chat.encode(before), chat.encode(sample), next_id, chat.encode(after))


def is_faithful(chat: ChatTemplate, taken: Taken, bridged: list[int], stops: frozenset[int]) -> bool:
    """Whether a bridged prompt keeps what was sampled and adds just what the template says after the reply."""
    if bridged[: len(taken.own)] != taken.own:
        return False
    own, whole = chat.decode(taken.own), chat.decode(taken.canonical)
    added = chat.decode(bridged)[len(own) :]
    rest = whole.removesuffix(added)
    placed = all(word in added and word not in rest for word in _words(taken.step))
    ends = tuple(chat.decode([token]) for token in {*stops, *chat.closings})
    follows = not _spoken(taken.step.reply) or _tail(rest, ends) in chat.decode(taken.output)
    return whole.endswith(added) and placed and follows


def _words(step: Step) -> list[str]:
    """The first word of each new message."""
    texts = [p.text for m in step.new for p in m.parts if isinstance(p, Text | ToolResult)]
    return [text.split()[0] for text in texts]


def _spoken(reply: Message) -> list[str]:
    """What must stand in a rendering that says the reply."""
    said = [p.text.split()[0] for p in reply.parts if isinstance(p, Text | Reasoning)]
    return [*said, *_values(reply)]


def _values(message: Message) -> list[str]:
    """What a message's calls are given."""
    return [str(v) for p in message.parts if isinstance(p, ToolCall) for v in json.loads(p.arguments).values()]


def _kept(asked: str, closed: str, then: str) -> str:
    """The reply as the template writes it in a history, when that follows the generation prompt; else nothing.

    Qwen3 puts an empty thought before a last reply without one, which no model needs to sample.
    """
    rest = then[len(asked) :] if then.startswith(asked) else ""
    return next(
        (rest[:length] for length in range(min(len(rest), len(closed)), 0, -1) if closed.endswith(rest[:length])), ""
    )


def _following(closed: str, then: str, last: str) -> str:
    """What the template writes behind a reply, whose last word is given, when something follows it."""
    end, rest = closed.rpartition(last)[2], then.rpartition(last)[2]
    return rest.removeprefix(end) if rest.startswith(end) else ""


def _sample(asked: str, closed: str) -> str:
    """What the model writes after the generation prompt, as the template itself writes it for a reply."""
    begins = common(asked, closed)
    begins -= asked[:begins].endswith("<")  # two markers, of which nothing else is shared
    opened = asked[begins:].strip() == _THINK  # R1's prompt opens a thought that its history leaves out
    return f"{_THOUGHT}{closed[begins:]}" if opened else closed[begins:]


def _tail(text: str, ends: tuple[str, ...]) -> str:
    """The last characters of a reply without its end of turn."""
    while text.endswith(ends):
        text = text.removesuffix(next(end for end in ends if text.endswith(end)))
    return text[-_TAIL:]
