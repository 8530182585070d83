"""One model's chat template over token ids: render a conversation, extend a sampled one, read a sample.

Invariant: `bridge` returns the parent's prompt and sampled ids unchanged, followed by new ids only; it never renders
history. Ids go in and out as int32 arrays; lists exist only at the border to the tokenizer libraries.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from renderers.base import load_tokenizer
from transformers import PreTrainedTokenizerFast

from polar_mitm.conversation import Message, Text, Tool, ToolCall
from polar_mitm.errors import BadRequest
from polar_mitm.tokens import difference, family, forcing, pieces, plain, probe, retention, script
from polar_mitm.tokens.chat_template import ChatTemplate
from polar_mitm.tokens.fingerprint import fingerprint
from polar_mitm.tokens.parsed import Parsed, from_renderer
from polar_mitm.tokens.retention import PRESERVE

Tokens = NDArray[np.int32]
Bridge = Literal["typed", "difference", "difference, texts only", "none"]
"""How a sampled context is extended: by the family's renderer, or by what the template itself writes."""


def load(folder: str | Path, history_thinking: str = PRESERVE) -> Template:
    """The template of a model or tokenizer folder (or a name that transformers can load).

    `history_thinking`: see `Template`. Raises OSError or ValueError, as transformers does, when the folder holds no
    tokenizer.
    """
    plain_files = _is_plain(Path(folder))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder)) if plain_files else load_tokenizer(str(folder))
    return Template(tokenizer, history_thinking, ends=_generation_ends(Path(folder)))


def _is_plain(folder: Path) -> bool:
    """Whether tokenizer.json says everything. AutoTokenizer would import torch: 6 s and 700 MB in a proxy."""
    config = folder / "tokenizer_config.json"
    complete = (folder / "tokenizer.json").is_file() and config.is_file()
    return complete and "auto_map" not in json.loads(config.read_text("utf-8"))


def _generation_ends(folder: Path) -> tuple[int, ...]:
    """The ids at which the model's own configuration ends a generation: Llama 3.1 has three."""
    file = folder / "generation_config.json"
    named = json.loads(file.read_text("utf-8")).get("eos_token_id") if file.is_file() else None
    return tuple(map(int, named)) if isinstance(named, list) else () if named is None else (int(named),)


class Template:
    """Renders, bridges and parses for one tokenizer."""

    def __init__(
        self, tokenizer: Any, history_thinking: str = PRESERVE, *, ends: tuple[int, ...] = ()
    ) -> None:  # Any: a transformers tokenizer, untyped
        """`history_thinking`: "preserve" keeps the reasoning that was sampled, "template" leaves it to the template.

        `ends` are ids, besides those that tokenizer and chat template show, at which the model stops.
        """
        tokenizer.clean_up_tokenization_spaces = False  # Llama 3's own setting decodes " ." as "."
        self._tokenizer, self.chat = tokenizer, ChatTemplate(tokenizer)
        self.preserves = history_thinking == PRESERVE
        """Whether reasoning stays in the context, whatever the harness and the template make of it."""
        self.found = family.find(tokenizer, self.chat)
        """What is known of the family, and what spoke against it."""
        self.family = self.found.name
        self._renderer = self.found.renderer
        self.vocabulary = len(tokenizer)
        """Number of ids; a valid id is below it."""
        self.stop_ids: tuple[int, ...] = tuple(sorted({*self._stops(), *ends}))
        self._difference = self._by_difference()
        self.bridges = self.found.extends or self._difference is not None
        """Whether a sampled context can be extended; when False, every call is a full render."""
        self._added = frozenset(tokenizer.added_tokens_decoder) | {*self.stop_ids}
        self._declines = frozenset[type]()
        self._declines = self._unfaithful_together()

    @property
    def bridge_kind(self) -> Bridge:
        """How a sampled context is extended."""
        if self._difference is None:
            return "typed" if self.bridges else "none"
        return "difference" if self._difference.after_calls else "difference, texts only"

    @property
    def fingerprint(self) -> str:
        """What the ids mean, as a short name."""
        return fingerprint(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special tokens added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """Text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=False))

    def render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...], *, closed: bool = False) -> Tokens:
        """Ids of a whole conversation, int32 [T]; with the generation prompt unless it is `closed`.

        Raises BadRequest when the model's template refuses the history.
        """
        try:
            if self._renderer is None or not self.found.renders:
                ids = self.chat.encode(self.chat.render(messages, tools, closed=closed))
            else:
                given, specs = plain.chat(messages), plain.specs(tools)
                ids = self._renderer.render_ids(given, tools=specs, add_generation_prompt=not closed)
        except Exception as error:  # jinja templates raise anything; the harness is told
            raise BadRequest(f"the model's chat template refuses this history: {error!r}") from error
        return np.asarray(ids, dtype=np.int32)

    def bridge(
        self, prompt: Tokens, output: Tokens, history: tuple[Message, ...], new: int, tools: tuple[Tool, ...]
    ) -> Tokens | None:
        """The parent's context extended by history[new:], or None when that cannot be done exactly.

        `history` is the whole request, `history[:new]` what the parent's prompt and output already say; `output` ends
        where what the harness was given of it ends. The cost is that of the new messages, whatever the prompt's length.
        """
        if not self.bridges or any(m.role == "assistant" for m in history[new:]) or self.rewrites(history[new:]):
            return None
        reply = {type(part) for part in history[new - 1].parts}
        if self._declines and self._declines <= reply:
            return None
        try:
            if self._difference is not None:
                more = self._difference.extend(output.tolist(), history, new, tools)
                return None if more is None else np.concatenate([prompt, output, np.asarray(more, dtype=np.int32)])
            return self._typed_bridge(prompt, output, plain.chat(history, new), plain.specs(tools))
        except Exception:  # noqa: BLE001 - templates and tokenizers raise anything; the full render then says why
            return None

    def _typed_bridge(self, prompt: Tokens, output: Tokens, new: list[Any], tools: list[Any] | None) -> Tokens | None:
        assert self._renderer is not None  # or there would be no typed bridge
        start = self.turn_start(prompt)  # Any: JSON
        extended = family.bridged(self._renderer, prompt[start:].tolist(), output.tolist(), new, tools)
        if extended is None:
            return None
        ids = np.asarray(extended, dtype=np.int32)
        own = np.concatenate([prompt[start:], output])
        return np.concatenate([prompt[:start], ids]) if np.array_equal(ids[: len(own)], own) else None

    def rewrites(self, new: tuple[Message, ...]) -> bool:
        """Whether the template decides about earlier reasoning, and writes the history anew when `new` follows."""
        return not self.preserves and retention.rewrites(self._tokenizer, new)

    def parse(self, output: Tokens, prompt: Tokens, tools: tuple[Tool, ...]) -> Parsed:
        """Read a sample. What is no well-formed call of an offered tool is given back as text, and never repaired."""
        if self._renderer is None:
            kept = [int(i) for i in output if i not in self.stop_ids]
            text = str(self._tokenizer.decode(kept, skip_special_tokens=True)).strip()
            return Parsed((Text(text),) if text else (), spoken=text)
        ids, turn = output.tolist(), prompt[self.turn_start(prompt) :].tolist()
        read = self._renderer.parse_response(ids, tools=plain.specs(tools), prompt_ids=turn)
        return from_renderer(read, tools, lambda span: self.decode(ids[slice(*span)]))

    def turn_start(self, prompt: Tokens) -> int:
        """Where the last turn of a prompt begins: no reasoning and no call reaches over the end of a turn."""
        ends = [np.flatnonzero(prompt == stop) for stop in self.stop_ids]
        return max((int(places[-1]) + 1 for places in ends if len(places)), default=0)

    def forced(self, name: str, tools: tuple[Tool, ...]) -> Tokens:
        """The beginning of a call of this tool ("": of any), to stand behind a generation prompt, int32 [T].

        Raises BadRequest when the tool is not offered or this template has no such beginning.
        """
        return forcing.beginning(name, tools, render=self.render, parse=self.parse)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token, which need not be whole characters."""
        return pieces.bytes_of(self._tokenizer, token)

    def is_plain(self, ids: Tokens) -> bool:
        """Whether none of the ids is an added token: no family's marker, and no end."""
        return self._added.isdisjoint(ids.tolist())

    def marks(self, ids: Tokens) -> list[int]:
        """The places of the added tokens."""
        return [at for at, token in enumerate(ids.tolist()) if token in self._added]

    def _by_difference(self) -> difference.Difference | None:
        """The bridge over the template itself, unless the typed renderer's is as good."""
        if self.found.bridges:
            return None
        made = difference.find(self.chat, frozenset(self.stop_ids))
        return None if self.found.extends and made and not made.after_calls else made

    def _unfaithful_together(self) -> frozenset[type]:
        """Kinds of parts that one reply must not have for it to be extended; none for most templates.

        Gemma 4's template moves the text of a reply that calls behind the results of its calls.
        """
        rendered = probe.render(self.chat, script.SPOKEN_CALL)
        if not self.bridges or isinstance(rendered, str):
            return frozenset()
        stops, step = frozenset(self.stop_ids), script.SPOKEN_CALL
        taken = rendered.ended(stops)
        prompt, output = (np.asarray(ids, dtype=np.int32) for ids in (taken.prompt, taken.output))
        ids = self.bridge(prompt, output, step.request, len(step.history) + 1, step.tools)
        faithful = ids is None or probe.is_faithful(self.chat, taken, ids.tolist(), stops)
        return frozenset() if faithful else frozenset({Text, ToolCall})

    def _stops(self) -> list[int]:
        """The family's, or the tokenizer's own end of text and the marker that ends a turn in the template."""
        if self._renderer is not None:
            return self._renderer.get_stop_token_ids()
        end = self._tokenizer.eos_token_id
        return [*self.chat.closings[:1], *([] if end is None else [end])]
