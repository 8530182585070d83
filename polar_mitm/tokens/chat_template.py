"""A model's own chat template over text and ids: what every bridge is measured against, and how it takes messages.

Invariant: nothing is rendered but by the template itself, so what it gives here is what a server without this project
would give to the model. In which form a template takes a call (`Shape`) is found by rendering one, never by a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from polar_mitm.conversation import Message, Text, Tool, ToolCall, ToolResult
from polar_mitm.tokens import plain
from polar_mitm.tokens.plain import Shape

_ASKED = Message("user", (Text("Look."),))
_CALLED = Message("assistant", (ToolCall("call_1", "peek", '{"path":"oats"}'),))
_GIVEN = Message("tool", (ToolResult("call_1", "barley"),))
_PEEK = Tool("peek", "Peeks.", '{"type":"object","properties":{"path":{"type":"string"}}}')
_SHAPES = (Shape(), Shape(arguments="text"))
MARK = "polarmark"
"""A word that stands where a reply would; no template trims or splits it."""


class ChatTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer, untyped
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._markers = frozenset(int(token) for token, it in added if str(it.content).strip())
        """Ids of the added tokens but white space, which Gemma's vocabulary has among them."""

    @cached_property
    def shape(self) -> Shape:
        """The form of messages in which this template says a call and its result; the first one when it says none."""
        return next((shape for shape in _SHAPES if self._says_a_call(shape)), _SHAPES[0])

    @cached_property
    def says_calls(self) -> bool:
        """Whether the template says a tool call and its result at all."""
        return self._says_a_call(self.shape)

    @cached_property
    def closings(self) -> tuple[int, ...]:
        """The markers with which an assistant's turn ends; none where the template writes none, or refuses.

        The first of them is written when nothing follows, the last one when something does: mostly they are one, but
        gpt-oss ends its last turn otherwise, and Phi-3 adds an end of text to it.
        """
        said = [*self.chat((_ASKED,)), {"role": "assistant", "content": MARK}]
        try:
            last = self.text(said, None, prompt=False)
            earlier = self.text([*said, *self.chat((_ASKED,))], None, prompt=True)
        except Exception:  # noqa: BLE001 - jinja templates raise anything; the turn's end then stays unknown
            return ()
        ends, both = (self.encode(text.partition(MARK)[2]) for text in (last, earlier))
        shared = common(ends, both)
        markers = [token for token in ends[:shared] if token in self._markers]
        if markers:
            return (markers[-1],)
        first = next((token for token in ends if token in self._markers), None)
        then = next((token for token in both if token in self._markers), None)
        return () if first is None or then is None else (first, then)

    def chat(self, messages: tuple[Message, ...], start: int = 0) -> list[Any]:  # Any: JSON
        """messages[start:] in the form that this template takes."""
        return plain.chat(messages, start, self.shape)

    def text(self, messages: list[Any], tools: list[Any] | None, *, prompt: bool) -> str:  # Any: JSON
        """What the template writes, with the generation prompt or without. Raises whatever the template raises."""
        return str(
            self._tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt, tokenize=False)
        )

    def render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...], *, closed: bool = False) -> str:
        """The text of a conversation; with the generation prompt unless it is `closed`. Raises as `text` does."""
        return self.text(self.chat(messages), plain.specs(tools), prompt=not closed)

    def head(self, messages: list[Any], tools: list[Any] | None) -> str:  # Any: JSON
        """What stands before a reply, as far as it is the same whether one follows or not. Raises as `text` does."""
        closed, asked = (self.text(messages, tools, prompt=prompt) for prompt in (False, True))
        return asked[: common(closed, asked)]

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which markers are read as such; nothing is added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: list[int]) -> str:
        """The text of ids, markers included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _says_a_call(self, shape: Shape) -> bool:
        messages = plain.chat((_ASKED, _CALLED, _GIVEN), 0, shape)
        try:
            text = self.text(messages, plain.specs((_PEEK,)), prompt=True)
        except Exception:  # noqa: BLE001 - jinja templates raise anything; this is then not the form they take
            return False
        said = text.rpartition("Look.")[2]
        return "peek" in said and "oats" in said and "barley" in said


def common(a: Sequence[int] | str, b: Sequence[int] | str) -> int:
    """How many leading ids, or characters, two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
