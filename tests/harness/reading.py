"""What a prompt of the Qwen3 family says, read from its tokens, and what the request said: to be the same.

Invariant: the prompt is read by code of its own, from the markers of the family's turns; nothing of the renderer, the
bridge or the project's parser is used. Of a reply its white space at the ends, its reasoning and the form of its JSON
do not count, as docs/equivalences.md says; all else does, to the byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from polar_mitm.conversation import Conversation, Message, Text, ToolCall, ToolResult

Turn = tuple[str, str, tuple[str, ...]]
"""Who speaks, the text, and the tool calls or tool results."""
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"(?:\A|\n\n)# Tools\n\nYou may call .*?<tools>\n(.*?)\n</tools>.*\Z", re.DOTALL)


def read(prompt: str) -> tuple[list[Turn], list[str]]:
    """The turns of a prompt up to the reply that it asks for, and the names of the tools that it offers."""
    *turns, (asked, begun) = [(found[1], found[2]) for found in _TURN.finditer(prompt)]
    assert (asked, begun) in (("assistant", ""), ("assistant", "<think>\n")), (
        f"no reply is asked for: {asked} {begun!r}"
    )
    offered = _TOOLS.search(turns[0][1]) if turns and turns[0][0] == "system" else None
    names = [json.loads(line)["function"]["name"] for line in offered[1].splitlines()] if offered else []
    return [turn for role, text in turns if (turn := _turn(role, text)) != ("system", "", ())], names


def _turn(role: str, text: str) -> Turn:
    if role == "system":
        return role, _TOOLS.sub("", text), ()
    if role == "user" and text.startswith("<tool_response>"):
        return role, "", tuple(_RESULT.findall(text))
    if role == "assistant":
        said = _THOUGHT.sub("", text)
        calls = (json.loads(call) for call in _CALL.findall(said))
        return role, _CALL.sub("", said).strip(), tuple(_called(call["name"], call["arguments"]) for call in calls)
    return role, text, ()


def _called(name: str, arguments: object) -> str:
    return json.dumps([name, arguments], sort_keys=True)


def asked(request: Conversation) -> tuple[list[Turn], list[str]]:
    """The turns of a request and the names of its tools, in the form that `read` gives."""
    return list(_turns(request.messages)), [tool.name for tool in request.tools]


def _turns(messages: Sequence[Message]) -> Iterator[Turn]:
    for is_results, group in groupby(messages, _has_results):
        if is_results:  # the family gives results that follow one another in one turn
            parts = [part for message in group for part in message.parts]
            yield "user", "", tuple(part.text for part in parts if isinstance(part, ToolResult))
            continue
        for message in group:
            texts = [part.text for part in message.parts if isinstance(part, Text)]
            if message.role == "assistant":
                yield "assistant", "".join(texts).strip(), tuple(map(_asked_call, _calls(message)))
            elif (turn := (message.role, "\n\n".join(texts), ())) != ("system", "", ()):
                yield turn


def _has_results(message: Message) -> bool:
    return any(isinstance(part, ToolResult) for part in message.parts)


def _calls(message: Message) -> list[ToolCall]:
    return [part for part in message.parts if isinstance(part, ToolCall)]


def _asked_call(call: ToolCall) -> str:
    return _called(call.name, {"input": call.arguments} if call.custom else json.loads(call.arguments))
