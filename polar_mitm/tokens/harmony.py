"""gpt-oss's renderer, made from the tokenizer at hand and put under the head that the model's chat template writes.

Its library would download the vocabulary when it is first made, and it begins a reply in the analysis channel, while
the template leaves the channel to the model (renderers 0.1.12).

Invariant: the file given to the library is what the tokenizer holds; the library checks its hash, so another model's
vocabulary is refused. Nothing stays on disk and nothing is fetched.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from renderers import ParsedResponse, RenderedTokens, Renderer

from polar_mitm.tokens import pieces

MARKER = "<|channel|>"
"""Only this family's vocabulary has it."""
_FOLDER = "TIKTOKEN_ENCODINGS_BASE"
_FILE = "o200k_base.tiktoken"


@contextmanager
def vocabulary(tokenizer: Any) -> Generator[None]:  # Any: a transformers tokenizer, untyped
    """While it is open, the encoding can be made without a network; a folder that the user named is left in place."""
    if _FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="polar-harmony-") as folder:
        (Path(folder) / _FILE).write_bytes(_ranks(tokenizer))
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[_FOLDER]


class Headed:
    """A renderer whose prompts end where the template's do: after `<|start|>assistant`."""

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:  # Any: a transformers tokenizer, untyped
        start, channel, message = tokenizer.convert_tokens_to_ids(["<|start|>", MARKER, "<|message|>"])
        self._renderer, self._start, self._message = renderer, int(start), int(message)
        self._head = [int(channel), *tokenizer.encode("analysis", add_special_tokens=False), self._message]

    def get_stop_token_ids(self) -> list[int]:
        """As the renderer's."""
        return self._renderer.get_stop_token_ids()

    def render_ids(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        """As the renderer does, without the channel."""  # Any: JSON
        return self._without_head(
            self._renderer.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        )

    def bridge_to_next_turn(
        self, prompt: list[int], output: list[int], new_messages: list[Any], *, tools: Any = None
    ) -> RenderedTokens | None:  # Any: JSON
        """As the renderer does, without the channel."""
        done = self._renderer.bridge_to_next_turn(prompt, output, new_messages, tools=tools)
        return None if done is None else replace(done, token_ids=self._without_head(done.token_ids))

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:  # Any: JSON
        """As the renderer does; the head that the prompt began is given to it as sampled, and taken out of spans."""
        ids = prompt_ids or []
        begun = ids[len(ids) - 1 - ids[::-1].index(self._start) :] if self._start in ids else []
        if self._message in begun:
            return self._renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
        read = self._renderer.parse_response([*begun, *token_ids], tools=tools)
        for call in read.tool_calls:
            if call.token_span is not None:
                first, last = call.token_span
                call.token_span = (max(0, first - len(begun)), last - len(begun))
        return read

    def _without_head(self, ids: list[int]) -> list[int]:
        return ids[: -len(self._head)] if ids[-len(self._head) :] == self._head else ids


def _ranks(tokenizer: Any) -> bytes:  # Any: a transformers tokenizer
    alphabet, added = pieces.byte_alphabet(), tokenizer.added_tokens_decoder
    ranked = sorted((rank, piece) for piece, rank in tokenizer.get_vocab().items() if rank not in added)
    lines = (base64.b64encode(bytes(alphabet.get(c, 0) for c in piece)) + b" %d\n" % rank for rank, piece in ranked)
    return b"".join(lines)
