"""One model's chat template over token ids: render a conversation, extend a sampled one, read a sample.

Invariant: `bridge` returns the parent's prompt and sampled ids unchanged, followed by new ids only; it never renders
history. Ids go in and out as int32 arrays; lists exist only at the border to the tokenizer libraries.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from renderers import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus
from renderers.base import load_tokenizer
from transformers import PreTrainedTokenizerFast

from polar_mitm.conversation import Message, Part, Reasoning, Text, Tool, ToolCall, ToolResult, joined_text
from polar_mitm.errors import BadRequest
from polar_mitm.tokens import difference, family

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A sample, read."""

    parts: tuple[Part, ...]
    """Reasoning, Text, ToolCall; the ids of tool calls are empty, the caller mints them."""
    reasoning_open: bool
    """Whether the sample ends inside its reasoning."""
    has_tool_call: bool
    """Whether a tool call, well-formed or not, begins in the sample."""


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

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, no special tokens added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """Text of ids, special tokens included."""
        return str(self._tokenizer.decode(list(map(int, ids)), skip_special_tokens=False))

    def render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> Tokens:
        """Prompt ids of a whole conversation with the generation prompt, int32 [T].

        Raises BadRequest when the model's template refuses the history.
        """
        plain, specs = _plain(messages), _specs(tools)
        try:
            if self._renderer is None:
                ids = family.by_template(self._tokenizer, plain, specs)
            else:
                ids = self._renderer.render_ids(plain, tools=specs, add_generation_prompt=True)
        except Exception as error:  # jinja templates raise anything; the harness is told
            raise BadRequest(f"the model's chat template refuses this history: {error!r}") from error
        return np.asarray(ids, dtype=np.int32)

    def bridge(
        self, prompt: Tokens, output: Tokens, history: tuple[Message, ...], new: int, tools: tuple[Tool, ...]
    ) -> Tokens | None:
        """The parent's context extended by history[new:], or None when that cannot be done exactly.

        `history` is the whole request, `history[:new]` what the parent's prompt and output already say.
        """
        if not self.bridges or any(m.role == "assistant" for m in history[new:]):
            return None
        fresh, specs = _plain(history)[_plain_length(history[:new]) :], _specs(tools)
        try:
            if self._renderer is None:
                return self._extend(prompt, output, difference.suffix_ids(self._tokenizer, fresh, specs))
            done = self._renderer.bridge_to_next_turn(prompt.tolist(), output.tolist(), fresh, tools=specs)
        except Exception:  # noqa: BLE001 - templates and tokenizers raise anything; the full render then says why
            return None
        if done is None:
            return None
        ids = np.asarray(done.token_ids, dtype=np.int32)
        known = len(prompt) + len(output)
        exact = np.array_equal(ids[: len(prompt)], prompt) and np.array_equal(ids[len(prompt) : known], output)
        return ids if exact else None

    def parse(self, output: Tokens, prompt: Tokens, tools: tuple[Tool, ...]) -> Parsed:
        """Read a sample. A malformed tool call is given back as text; JSON is never repaired."""
        if self._renderer is None:
            kept = [int(i) for i in output if i not in self.stop_ids]
            text = str(self._tokenizer.decode(kept, skip_special_tokens=True)).strip()
            return Parsed((Text(text),) if text else (), reasoning_open=False, has_tool_call=False)
        read = self._renderer.parse_response(output.tolist(), tools=_specs(tools), prompt_ids=prompt.tolist())
        return _parsed(read, {tool.name for tool in tools if tool.custom})

    def _extend(self, prompt: Tokens, output: Tokens, suffix: list[int]) -> Tokens:
        if len(output) and output[-1] in self.stop_ids and suffix and suffix[0] in self.stop_ids:
            suffix = suffix[1:]  # the sample already holds its end of turn
        return np.concatenate([prompt, output, np.asarray(suffix, dtype=np.int32)])


def _parsed(read: ParsedResponse, custom: set[str]) -> Parsed:
    parts: list[Part] = []
    if read.reasoning_content and read.reasoning_content.strip():
        parts.append(Reasoning(read.reasoning_content.strip()))
    text = read.content.strip()
    broken = [_raw(call) for call in read.tool_calls if call.status != ToolCallParseStatus.OK]
    text = "\n".join([text, *broken]).strip()
    if text:
        parts.append(Text(text))
    parts += [_call(call, custom) for call in read.tool_calls if call.status == ToolCallParseStatus.OK]
    return Parsed(tuple(parts), read.reasoning_complete is False, bool(read.tool_calls))


def _raw(call: ParsedToolCall) -> str:
    cut = call.status == ToolCallParseStatus.UNCLOSED_BLOCK
    return f"<tool_call>\n{call.raw}" if cut else f"<tool_call>\n{call.raw}\n</tool_call>"


def _call(call: ParsedToolCall, custom: set[str]) -> ToolCall:
    arguments, name = call.arguments, call.name or ""
    if name in custom and isinstance(arguments, dict) and isinstance(arguments.get("input"), str):
        return ToolCall("", name, arguments["input"], custom=True)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return ToolCall("", name, text)


def _specs(tools: tuple[Tool, ...]) -> list[Any] | None:  # Any: OpenAI function specifications
    free_form = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": free_form if tool.custom else json.loads(tool.parameters or "{}"),
            },
        }
        for tool in tools
    ] or None


def _plain(messages: tuple[Message, ...]) -> list[Any]:  # Any: chat messages as the templates take them
    names = {p.id: p.name for m in messages for p in m.parts if isinstance(p, ToolCall)}
    return [plain for message in messages for plain in _plain_message(message, names)]


def _plain_length(messages: tuple[Message, ...]) -> int:
    return sum(max(1, sum(isinstance(p, ToolResult) for p in m.parts)) for m in messages)


def _plain_message(message: Message, names: dict[str, str]) -> list[dict[str, Any]]:  # Any: JSON
    results = [p for p in message.parts if isinstance(p, ToolResult)]
    if results:
        return [
            {"role": "tool", "content": r.text, "tool_call_id": r.call_id, "name": names.get(r.call_id, "")}
            for r in results
        ]
    plain: dict[str, Any] = {"role": message.role, "content": joined_text(message)}
    calls = [_plain_call(p) for p in message.parts if isinstance(p, ToolCall)]
    reasoning = "".join(p.text for p in message.parts if isinstance(p, Reasoning))
    if reasoning:
        plain["reasoning_content"] = reasoning
    if calls:
        plain["tool_calls"] = calls
    return [plain]


def _plain_call(call: ToolCall) -> dict[str, Any]:  # Any: JSON
    try:
        arguments = {"input": call.arguments} if call.custom else json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments  # a harness may send back arguments that are no JSON: shown as they are
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
