"""The beginning of a tool call that a request forces: what the template itself writes before the call's free part.

Invariant: a beginning is found by rendering, never spelled here, and it is used only after the family's own parser was
seen to read it, continued, as that very call.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from polar_mitm.conversation import Message, Part, Text, Tool, ToolCall
from polar_mitm.errors import BadRequest
from polar_mitm.tokens.parsed import Parsed

Tokens = NDArray[np.int32]
_ASKED = Message("user", (Text("?"),))
_ARGUMENTS = ("{}", '{"x": 1}')
_FREE_FORM = ("x", "9")


def beginning(
    forced: str, tools: tuple[Tool, ...], *, render: Callable[..., Tokens], parse: Callable[..., Parsed]
) -> Tokens:
    """Ids to put behind a generation prompt so that the model goes on with a call, int32 [T].

    `forced` names the tool, or is "" for any of them. `render(messages, tools, closed)` and `parse(ids, prompt, tools)`
    are the template's. Raises BadRequest when the tool is not offered or the template has no such beginning.
    """
    named = [tool for tool in tools if forced in ("", tool.name)]
    if not named:
        raise BadRequest(f"tool_choice: {forced!r} is not among the offered tools {[t.name for t in tools]}")
    prompt = render((_ASKED,), (), closed=False)
    wholes = [_whole(tool, given, render) for tool in named for given in range(2)]
    if any(not np.array_equal(whole[: len(prompt)], prompt) for whole in wholes):
        raise _impossible(forced, "a call does not begin where the model's turn does")
    found = _common([whole[len(prompt) :] for whole in wholes])
    read = [parse(whole[len(prompt) :], prompt, tools).parts for whole in wholes[::2]]
    if not len(found) or any(_names(parts) != [tool.name] for tool, parts in zip(named, read, strict=True)):
        raise _impossible(forced, "its calls are not read back")
    return found


def _names(parts: tuple[Part, ...]) -> list[str]:
    return [part.name for part in parts if isinstance(part, ToolCall)]


def _whole(tool: Tool, given: int, render: Callable[..., Tokens]) -> Tokens:
    arguments = _FREE_FORM[given] if tool.custom else _ARGUMENTS[given]
    call = ToolCall("call_1", tool.name, arguments, custom=tool.custom)
    return render((_ASKED, Message("assistant", (call,))), (), closed=True)


def _common(sequences: list[Tokens]) -> Tokens:
    """The longest beginning that all have, short of any one's end."""
    length = min(len(ids) for ids in sequences) - 1
    block = np.stack([ids[:length] for ids in sequences])
    different = np.flatnonzero((block != block[0]).any(axis=0))
    return block[0][: int(different[0])] if len(different) else block[0]


def _impossible(forced: str, why: str) -> BadRequest:
    wanted = f"the tool {forced!r}" if forced else "a tool call"
    return BadRequest(f"tool_choice: {wanted} cannot be forced with this model's chat template ({why}): use 'auto'")
