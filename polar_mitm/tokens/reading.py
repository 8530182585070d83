"""A sample that still grows, read as deltas for the harness.

Invariant: what was given out never changes, so the deltas of a kind are a prefix of the finished reply's text of that
kind. To keep it so, white space at the end and half characters are held back, and nothing is given out once a tool
call began. Reading is bounded: each read waits until the sample has grown by a 32nd, so the whole costs O(n log n).
"""

from __future__ import annotations

import numpy as np

from polar_mitm.conversation import Part, Reasoning, Text, Tool
from polar_mitm.tokens.template import Parsed, Template, Tokens

_HALF_CHARACTER = "\ufffd"


class Reading:
    """Turns pieces of sampled ids into ("reasoning" | "text", delta) pairs, and at the end into parts."""

    def __init__(self, template: Template, prompt: Tokens, tools: tuple[Tool, ...]) -> None:
        self._template, self._prompt, self._tools = template, prompt, tools
        self._pieces: list[Tokens] = []
        self._length = self._read_at = 0
        self._said = {"reasoning": "", "text": ""}
        self._quiet = False

    @property
    def output_ids(self) -> Tokens:
        """All ids so far, int32 [T]."""
        return np.concatenate(self._pieces) if self._pieces else np.empty(0, np.int32)

    def push(self, ids: Tokens) -> list[tuple[str, str]]:
        """Take more ids; return what can be said now."""
        self._pieces.append(ids)
        self._length += len(ids)
        if self._quiet or self._length < self._read_at + max(1, self._read_at // 32):
            return []
        self._read_at = self._length
        read = self._parse()
        self._quiet = read.has_tool_call
        return [] if self._quiet else self._news(read)

    def finish(self) -> tuple[Part, ...]:
        """The parts of the whole sample. Text that was given out stands as it was given out."""
        parts = self._parse().parts
        return tuple(self._keep(part) for part in parts)

    def _parse(self) -> Parsed:
        return self._template.parse(self.output_ids, self._prompt, self._tools)

    def _news(self, read: Parsed) -> list[tuple[str, str]]:
        news: list[tuple[str, str]] = []
        for part in read.parts:
            kind = "reasoning" if isinstance(part, Reasoning) else "text"
            text = part.text.rstrip().rstrip(_HALF_CHARACTER) if isinstance(part, Reasoning | Text) else ""
            said = self._said[kind]
            if text.startswith(said) and len(text) > len(said):
                news.append((kind, text[len(said) :]))
                self._said[kind] = text
        return news

    def _keep(self, part: Part) -> Part:
        if isinstance(part, Text) and not part.text.startswith(self._said["text"]):
            return Text(self._said["text"])
        if isinstance(part, Reasoning) and not part.text.startswith(self._said["reasoning"]):
            return Reasoning(self._said["reasoning"])
        return part
