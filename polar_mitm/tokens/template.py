"""One model's chat template over token ids: render a conversation, extend a sampled one, read a sample.

Invariant: `bridge` returns the parent's prompt and sampled ids unchanged, followed by new ids only; it never renders
history. Ids go in and out as int32 arrays; lists exist only at the border to the tokenizer libraries.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from renderers import Renderer
from renderers.base import load_tokenizer
from transformers import PreTrainedTokenizerFast

from polar_mitm.conversation import Message, Text, Tool
from polar_mitm.errors import BadRequest
from polar_mitm.tokens import difference, family, forcing, pieces, plain
from polar_mitm.tokens.parsed import Parsed, from_renderer

Tokens = NDArray[np.int32]


def load(folder: str | Path) -> Template:
    """The template of a model or tokenizer folder (or a name that transformers can load).

    Raises OSError or ValueError, as transformers does, when the folder holds no tokenizer.
    """
    if _is_plain(Path(folder)):
        return Template(PreTrainedTokenizerFast.from_pretrained(str(folder)))
    return Template(load_tokenizer(str(folder)))


def _is_plain(folder: Path) -> bool:
    """Whether tokenizer.json says everything. AutoTokenizer would import torch: 6 s and 700 MB in a proxy."""
    config = folder / "tokenizer_config.json"
    complete = (folder / "tokenizer.json").is_file() and config.is_file()
    return complete and "auto_map" not in json.loads(config.read_text("utf-8"))


class Template:
    """Renders, bridges and parses for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer, untyped
        self._tokenizer = tokenizer
        renderer, self.family = family.find(tokenizer)
        self._renderer: Renderer | None = renderer
        self.bridges = renderer is not None or difference.works(tokenizer)
        """Whether a sampled context can be extended; when False, every call is a full render."""
        self.vocabulary = len(tokenizer)
        """Number of ids; a valid id is below it."""
        self.stop_ids: tuple[int, ...] = tuple(
            sorted(set(renderer.get_stop_token_ids() if renderer else [tokenizer.eos_token_id]))
        )
        self._added = frozenset(tokenizer.added_tokens_decoder) | {*self.stop_ids}

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
        given, specs = plain.chat(messages), plain.specs(tools)
        try:
            if self._renderer is None:
                ids = family.by_template(self._tokenizer, given, specs, prompt=not closed)
            else:
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
        if not self.bridges or any(m.role == "assistant" for m in history[new:]):
            return None
        fresh, specs = plain.chat(history, new), plain.specs(tools)
        start = self.turn_start(prompt)
        try:
            if self._renderer is None:
                suffix = difference.suffix_ids(self._tokenizer, fresh, specs)
                return self._extend(prompt, output, suffix)
            turn = prompt[start:].tolist()
            done = self._renderer.bridge_to_next_turn(turn, output.tolist(), fresh, tools=specs)
        except Exception:  # noqa: BLE001 - templates and tokenizers raise anything; the full render then says why
            return None
        if done is None:
            return None
        ids = np.asarray(done.token_ids, dtype=np.int32)
        own = np.concatenate([prompt[start:], output])
        return np.concatenate([prompt[:start], ids]) if np.array_equal(ids[: len(own)], own) else None

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

    def _extend(self, prompt: Tokens, output: Tokens, suffix: list[int]) -> Tokens:
        if len(output) and output[-1] in self.stop_ids and suffix and suffix[0] in self.stop_ids:
            suffix = suffix[1:]  # the sample already holds its end of turn
        return np.concatenate([prompt, output, np.asarray(suffix, dtype=np.int32)])
