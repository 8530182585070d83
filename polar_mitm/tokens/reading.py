"""A sample that still grows, read as deltas for the harness, and at its end as the parts of a reply.

Invariant: what was given out never changes, so the deltas of a kind are a prefix of the finished reply's text of that
kind. To keep it so, white space at the end, half characters and what may begin a stop string are held back, and
nothing behind the beginning of a tool call is given out. Reading is cheap: plain text is decoded from where it was
left; the family's parser, which reads the whole, waits until the sample has grown by a 32nd: O(n log n) altogether.

Stop strings end the visible text, as with the providers: they are not searched in reasoning nor in tool calls. White
space at the very beginning of a reply is no part of its text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polar_mitm.conversation import Part, Reasoning, Text, Tool
from polar_mitm.tokens import stops
from polar_mitm.tokens.parsed import Fault, Parsed
from polar_mitm.tokens.template import Template, Tokens

Kind = Literal["reasoning", "text"]
_HALF_CHARACTER = "\ufffd"
_MARKERS = frozenset("<>[]{}|`")
"""Characters with which the families that have no atomic tokens for it begin a call or a thought."""
_MARKER_REACH = 48
"""No such beginning is longer, in characters."""
_WINDOW = 6
"""Tokens decoded again so that the new ones are read in their context."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole sample, read."""

    parts: tuple[Part, ...]
    """See `Parsed.parts`; text that was given out stands as it was given out."""
    faults: tuple[Fault, ...]
    reasoning: int
    """How many leading ids are its reasoning."""
    text: tuple[int, int]
    """The ids [start, end) of its visible text; empty when it has none, or when nobody asked for them."""
    stopped_by: str | None = None
    kept: int | None = None
    """How many leading ids the reply stands for when a stop string ended it; None: all."""
    extendable: bool = True
    """False when the stop string began inside a token: no ids are exactly what the harness was given."""


class Reading:
    """Turns pieces of sampled ids into ("reasoning" | "text", delta) pairs, and at the end into parts."""

    def __init__(
        self,
        template: Template,
        prompt: Tokens,
        tools: tuple[Tool, ...],
        *,
        forced: int = 0,
        stop: tuple[str, ...] = (),
    ) -> None:
        """`forced` is how many ids at the prompt's end are the beginning of the reply."""
        begun = len(prompt) - forced
        self._template, self._tools, self._stop = template, tools, stop
        self._prompt, self._head = prompt[template.turn_start(prompt[:begun]) : begun], prompt[begun:]
        self._pieces: list[Tokens] = []
        self._ids, self._joined = np.empty(0, np.int32), 0  # the first pieces as one
        self._unread = self._quiet = False
        self._read_at = 0  # ids that the parser read
        self._told_at = 0  # ids of which everything that can be said was said
        self._kind: Kind | None = None  # what the sample ends in, when it ends in plain text
        self._marked = False  # whether that may be the beginning of a call or a thought
        self._text = ""  # all of it, white space at its end included
        self._said: dict[Kind, str] = {"reasoning": "", "text": ""}
        self.stopped = False
        """Whether a stop string was found: nothing more need be sampled."""

    @property
    def output_ids(self) -> Tokens:
        """All ids so far, int32 [T]."""
        new = self._pieces[self._joined :]
        if new:
            self._joined, self._ids = self._joined + len(new), np.concatenate([self._ids, *new])
        return self._ids

    def take(self, ids: Tokens) -> None:
        """Take more ids, without reading them; another thread may be reading."""
        self._pieces.append(ids)
        self._unread = True

    def push(self, ids: Tokens) -> list[tuple[Kind, str]]:
        """Take more ids; return what can be said now."""
        self.take(ids)
        return self.read()

    def read(self) -> list[tuple[Kind, str]]:
        """What can be said now of the ids that were taken."""
        if not self._unread or self._quiet or self.stopped:
            return []
        self._unread = False
        ids = self.output_ids
        if self._is_text(ids):
            return self._news()
        if len(ids) < self._read_at + max(1, self._read_at // 32) and not self._may_stop(ids):
            return []
        read = self._parse(ids)
        self._read_at = self._told_at = len(ids)
        if stops.first(self._searched(read, ids), self._stop):
            self.stopped = True
            return []
        self._quiet = read.has_tool_call
        return self._retold(read, ids)

    # -- deltas

    def _is_text(self, ids: Tokens) -> bool:
        """Whether the new ids only go on with the text that was being read; takes it up if so."""
        if self._kind is None or self._marked or not self._template.is_plain(ids[self._told_at :]):
            return False
        window = ids[max(0, self._told_at - _WINDOW) :]
        before = self._template.decode(window[: len(window) - (len(ids) - self._told_at)])
        after = self._template.decode(window)
        fresh = after[len(before) :]
        if not after.startswith(before) or before.endswith(_HALF_CHARACTER):
            return False
        if not _MARKERS.isdisjoint(fresh):
            self._marked = True
            return False
        if after.endswith(_HALF_CHARACTER):
            return True  # the rest of the character comes with the next ids
        if self._kind == "text" and stops.first(self._text[-self._reach :] + fresh, self._stop):
            return False  # the parser finds its place
        self._text, self._told_at = self._text + fresh, len(ids)
        return True

    def _may_stop(self, ids: Tokens) -> bool:
        """Whether the parser must look now, because the new ids may hold a stop string or begin the visible text."""
        if not self._stop or not len(ids):
            return False
        if self._kind == "reasoning":
            return not self._template.is_plain(ids[self._told_at :])
        return stops.first(self._template.decode(ids[max(0, self._told_at - self._reach) :]), self._stop) is not None

    @property
    def _reach(self) -> int:
        return max((len(stop) for stop in self._stop), default=1)

    def _retold(self, read: Parsed, ids: Tokens) -> list[tuple[Kind, str]]:
        """The news of what the parser read; of a sample with a call, what was spoken before it."""
        news: list[tuple[Kind, str]] = []
        said: tuple[tuple[Kind, str], ...] = (("reasoning", read.of(Reasoning)), ("text", read.spoken))
        self._kind = None
        for kind, text in said:
            if text:
                self._kind, self._text = kind, text
                news += self._news()
        if read.has_tool_call or (self._kind == "reasoning" and not read.reasoning_open):
            self._kind = None  # something else begins
        else:
            self._text += self._space(self._unended(ids))
        self._marked = not _MARKERS.isdisjoint(self._text[-_MARKER_REACH:])
        return news

    def _news(self) -> list[tuple[Kind, str]]:
        kind = self._kind
        if kind is None:
            return []
        text, said = self._text.rstrip(_HALF_CHARACTER), self._said[kind]
        if kind == "text":
            text = text[: len(text) - stops.held(text, self._stop)]
        text = text.rstrip().rstrip(_HALF_CHARACTER).rstrip()
        if not text.startswith(said) or len(text) == len(said):
            return []
        self._said[kind] = text
        return [(kind, text[len(said) :])]

    def _space(self, ids: Tokens) -> str:
        """The white space at the end of ids, which a parser trims."""
        text = self._template.decode(ids[-16:])
        return text[len(text.rstrip()) :]

    # -- the end

    def finish(self, *, scored: bool = False) -> Finished:
        """The whole sample, read; `scored` when the ids of its visible text are wanted, which costs more."""
        ids = self.output_ids
        read = self._parse(ids)
        if stops.first(self._searched(read, ids), self._stop):
            return self._cut(ids)
        parts = tuple(self._keep(part) for part in read.parts)
        reasoning = self._reasoning(read, ids)
        return Finished(parts, read.faults, reasoning, self._span(read, ids, reasoning) if scored else (0, 0))

    def _cut(self, ids: Tokens) -> Finished:
        """The reply ends before the first stop string; the ids from it on are none of it."""
        ids = ids[: self._least(len(ids), lambda n: self._stops_at(ids[:n]) is not None)]
        read = self._parse(ids)
        text = self._searched(read, ids)
        place, stop = stops.first(text, self._stop) or (len(text), "")
        kept, extendable = self._kept(ids, text[place:])
        parts = tuple(part for part in read.parts if isinstance(part, Reasoning))
        if said := text[:place].rstrip():
            parts = (*parts, Text(said))
        reasoning = self._reasoning(read, ids)
        start, _ = self._span(read, ids, reasoning)
        span = (start, max(start, kept)) if said else (kept, kept)
        return Finished(parts, (), reasoning, span, stop, kept, extendable)

    def _kept(self, ids: Tokens, after: str) -> tuple[int, bool]:
        """How many ids stand before `after`, which ends their text, and whether they are exactly what does.

        A token that the stop string begins in is kept when it has only white space of it: the ends of a reply's text
        do not count. When it has more, it is not.
        """
        ended = self._unended(ids)
        for start in range(len(ended) - 1, -1, -1):
            rest = self._template.decode(ended[start:])
            if rest.endswith(after):
                own = rest[: len(rest) - len(after)]
                token = self._template.decode(ended[start : start + 1])
                if not own.strip():
                    return start, True
                return (start + 1, True) if not token[len(own) :].strip() else (start, False)
        return 0, False  # the family's text is not what its tokens decode to

    def _reasoning(self, read: Parsed, ids: Tokens) -> int:
        thought = read.of(Reasoning)
        if not thought:
            return 0
        if read.reasoning_open:
            return len(self._unended(ids))

        def is_over(n: int) -> bool:
            part = self._parse(ids[:n])
            return not part.reasoning_open and part.of(Reasoning) == thought

        likely = (at + 1 for at in self._template.marks(ids) if is_over(at + 1))  # most families end it with a marker
        end = next(likely, None)
        if end is not None and not is_over(end - 1):
            return end
        return self._least(len(ids), is_over)

    def _span(self, read: Parsed, ids: Tokens, reasoning: int) -> tuple[int, int]:
        """The ids of the visible text: from the first that shows any to the one before a call or the end."""
        end = len(self._unended(ids)) if read.faults else self._text_end(read, ids)
        if not read.of(Text):
            return end, end
        start = self._least(end, lambda n: n > reasoning and bool(self._parse(ids[:n]).of(Text))) - 1
        return start, end

    def _text_end(self, read: Parsed, ids: Tokens) -> int:
        end = len(self._unended(ids))
        return end if read.calls_at is None else max(0, min(end, read.calls_at - len(self._head)))

    def _searched(self, read: Parsed, ids: Tokens) -> str:
        """The text in which stop strings end the reply."""
        return read.spoken + self._space(ids[: self._text_end(read, ids)]) if self._stop and read.spoken else ""

    def _stops_at(self, ids: Tokens) -> tuple[int, str] | None:
        return stops.first(self._searched(self._parse(ids), ids), self._stop)

    def _parse(self, ids: Tokens) -> Parsed:
        return self._template.parse(np.concatenate([self._head, ids]), self._prompt, self._tools)

    def _unended(self, ids: Tokens) -> Tokens:
        """Without the end of turn."""
        return ids[:-1] if len(ids) and ids[-1] in self._template.stop_ids else ids

    @staticmethod
    def _least(high: int, holds: Callable[[int], bool]) -> int:
        """The smallest n for which `holds`, which is true from some n <= high on."""
        low = 0
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

    def _keep(self, part: Part) -> Part:
        if isinstance(part, Text) and not part.text.startswith(self._said["text"]):
            return Text(self._said["text"])
        if isinstance(part, Reasoning) and not part.text.startswith(self._said["reasoning"]):
            return Reasoning(self._said["reasoning"])
        return part
