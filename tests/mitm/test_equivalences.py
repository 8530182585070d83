"""Which changes leave a history the same: the list of docs/equivalences.md, each with its negative control."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polar_mitm.conversation import (
    Conversation,
    Message,
    Part,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
    history_keys,
    tools_key,
)
from polar_mitm.tips import Kept, Parent, Tips
from polar_mitm.turn import uncut
from polar_mitm.wire import DIALECTS
from tests.mitm.test_tips import row

Json = dict[str, Any]
DOCUMENT = Path(__file__).parents[2] / "docs" / "equivalences.md"
ASKED = Message("user", (Text("Look."),))
CALL = ToolCall("call_1", "run", '{"command":"ls","n":1}')
PATCH = ToolCall("call_1", "patch", "*** Begin\n+x\n", custom=True)
THOUGHT, SAID = Reasoning("Let me look at the files."), Text("I look.")
REPLY: tuple[Part, ...] = (THOUGHT, SAID, CALL)


@dataclass(frozen=True, slots=True)
class OfAReply:
    """What may come back as a reply of ours, and what must not."""

    same: tuple[Part, ...]
    other: tuple[Part, ...]
    reply: tuple[Part, ...] = REPLY


@dataclass(frozen=True, slots=True)
class OfAProtocol:
    """Two requests of one dialect that say the same, and one that does not."""

    dialect: str
    first: Json
    same: Json
    other: Json


def called(arguments: str, name: str = "run", call_id: str = "call_1") -> ToolCall:
    return ToolCall(call_id, name, arguments)


def chat(*messages: Json) -> Json:
    return {"model": "m", "messages": [{"role": "user", "content": "Look."}, *messages]}


def claude(*messages: Json, system: Sequence[str] = ()) -> Json:
    blocks = [{"type": "text", "text": text} for text in system]
    said = [{"role": "user", "content": "Look."}, *messages]
    return {"model": "m", "max_tokens": 9, "messages": said, **({"system": blocks} if blocks else {})}


def codex(*items: Json) -> Json:
    return {
        "model": "m",
        "input": [{"role": "user", "content": "Look."}, *items, {"role": "user", "content": "Go on."}],
    }


def gemini(*results: str) -> Json:
    call = {"functionCall": {"id": "call_1", "name": "run", "args": {}}}
    parts = [{"functionResponse": {"id": "call_1", "name": "run", "response": {"output": r}}} for r in results]
    return {
        "model": "m",
        "contents": [
            {"role": "user", "parts": [{"text": "Look."}]},
            {"role": "model", "parts": [call]},
            {"role": "user", "parts": parts},
        ],
    }


def said_block(text: str, **more: Any) -> Json:
    return {"role": "user", "content": [{"type": "text", "text": text, **more}]}


_TEXT_ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
_CALL_ITEM = {"type": "function_call", "call_id": "call_1", "name": "run", "arguments": "{}"}
_CHAT_CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
_DETAILS = [{"type": "reasoning.text", "text": "Hm.", "index": 0}]
EQUIVALENCES: dict[str, OfAReply | OfAProtocol] = {
    "white space at the ends of text": OfAReply(
        (THOUGHT, Text(" I look.\n\n"), CALL), (THOUGHT, Text("I  look."), CALL)
    ),
    "arguments written anew": OfAReply(
        (THOUGHT, SAID, called('{ "n": 1, "command": "l\\u0073" }')),
        (THOUGHT, SAID, called('{"command":"ls","n":"1"}')),
    ),
    "white space at the ends of free-form input": OfAReply(
        (ToolCall("call_1", "patch", " *** Begin\n+x", custom=True),),
        (ToolCall("call_1", "patch", "*** Begin\n+ x", custom=True),),
        (PATCH,),
    ),
    "reasoning left out": OfAReply((SAID, CALL), (CALL,)),
    "reasoning trimmed": OfAReply((Reasoning("look at\nthe files. "), SAID, CALL), (Reasoning("Look!"), SAID, CALL)),
    "reasoning of a cut reply before the next one's": OfAReply(
        (Reasoning("I wonder."), THOUGHT, SAID, CALL), (THOUGHT, Reasoning("I wonder."), SAID, CALL)
    ),
    "another call id": OfAReply(
        (THOUGHT, SAID, called(CALL.arguments, call_id="toolu_9")), (THOUGHT, SAID, CALL, CALL)
    ),
    "empty parts": OfAReply((Text(""), Reasoning(""), THOUGHT, SAID, CALL, Text("")), (THOUGHT, SAID, CALL, Text("."))),
    "text in pieces": OfAReply(
        (Reasoning("Let me look "), Reasoning("at the files."), Text("I "), Text("look."), CALL),
        (THOUGHT, Text("I "), CALL, Text("look.")),
    ),
    "one reply as several items": OfAProtocol(
        "openai_responses",
        codex(_TEXT_ITEM, _CALL_ITEM),
        codex({"type": "reasoning", "summary": [], "encrypted_content": "x"}, _TEXT_ITEM, _CALL_ITEM),
        codex(_TEXT_ITEM, {"role": "user", "content": "Wait."}, _CALL_ITEM),
    ),
    "reasoning of a reply that was cut off": OfAProtocol(
        "openai_responses",
        {"model": "m", "input": [{"role": "user", "content": "Look."}]},
        {
            "model": "m",
            "input": [
                {"role": "user", "content": "Look."},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            ],
        },
        {"model": "m", "input": [{"role": "user", "content": "Look."}, _TEXT_ITEM]},
    ),
    "fields moved by litellm": OfAProtocol(
        "openai_chat",
        chat(
            {"role": "assistant", "content": "Hi.", "reasoning_details": _DETAILS}, {"role": "user", "content": "So?"}
        ),
        chat(
            {"role": "assistant", "content": "Hi.", "provider_specific_fields": {"reasoning_details": _DETAILS}},
            {"role": "user", "content": "So?"},
        ),
        chat(
            {"role": "assistant", "content": "Hi!", "reasoning_details": _DETAILS}, {"role": "user", "content": "So?"}
        ),
    ),
    "text as a string or as one block": OfAProtocol(
        "anthropic",
        claude({"role": "user", "content": "Now."}),
        claude(said_block("Now.")),
        claude({"role": "user", "content": [{"type": "text", "text": "No"}, {"type": "text", "text": "w."}]}),
    ),
    "cache marks": OfAProtocol(
        "anthropic",
        claude(said_block("Now.")),
        claude(said_block("Now.", cache_control={"type": "ephemeral"})),
        claude(said_block("Now. ", cache_control={"type": "ephemeral"})),
    ),
    "the billing block": OfAProtocol(
        "anthropic",
        claude(system=("x-anthropic-billing-header: cc_version=1; cch=0;", "Be brief.")),
        claude(system=("x-anthropic-billing-header: cc_version=1; cch=9;", "Be brief.")),
        claude(system=("x-anthropic-billing-header: cc_version=1; cch=0;", "Be brief. ")),
    ),
    "a result given twice": OfAProtocol("gemini", gemini("a.txt"), gemini("a.txt", "a.txt"), gemini("a.txt", "b.txt")),
}
of_a_reply = {name: each for name, each in EQUIVALENCES.items() if isinstance(each, OfAReply)}
of_a_protocol = {name: each for name, each in EQUIVALENCES.items() if isinstance(each, OfAProtocol)}


def goes_on(reply: tuple[Part, ...], sent_back: tuple[Part, ...], first: Message = ASKED) -> bool:
    """Whether a request with this history goes on from the call that gave the reply."""
    history = (ASKED, Message("assistant", reply))
    kept = row("one", ASKED, reply=history[-1], history_key=history_keys(history)[-1], tools_key=tools_key(()))
    known = Tips()
    known.add("s", Kept.of(kept))
    request = Conversation("m", (first, Message("assistant", sent_back), Message("user", (Text("Go on."),))))
    return isinstance(known.find("s", request, [("one", 0)]), Parent)


def key(dialect: str, body: Json) -> bytes:
    """The key of a request's whole history."""
    (found,) = [d for d in DIALECTS if d.name == dialect]
    return history_keys(uncut(found.decode(body, {})).messages)[-1]


@pytest.mark.parametrize("name", of_a_reply)
def test_a_listed_change_of_a_reply_leaves_the_history_the_same(name: str) -> None:
    """The call is its parent's child."""
    case = of_a_reply[name]
    assert goes_on(case.reply, case.reply)
    assert goes_on(case.reply, case.same)


@pytest.mark.parametrize("name", of_a_reply)
def test_the_change_beside_it_is_an_edit(name: str) -> None:
    """The negative control: a fork, whatever id the request names."""
    case = of_a_reply[name]
    assert not goes_on(case.reply, case.other)


@pytest.mark.parametrize("name", of_a_protocol)
def test_a_listed_form_of_a_request_says_the_same(name: str) -> None:
    """The protocol has two ways to say it, or the harness says more than is said."""
    case = of_a_protocol[name]
    assert key(case.dialect, case.first) == key(case.dialect, case.same)


@pytest.mark.parametrize("name", of_a_protocol)
def test_the_form_beside_it_says_something_else(name: str) -> None:
    """The negative control."""
    case = of_a_protocol[name]
    assert key(case.dialect, case.first) != key(case.dialect, case.other)


@pytest.mark.parametrize("role", ["system", "user", "tool"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: f"{t} ",
        lambda t: f"\n{t}",
        lambda t: t.replace('":', '": '),
        lambda t: t.replace("<think>", "<think> "),
    ],
    ids=["space behind", "space before", "JSON", "reasoning"],
)
def test_what_the_harness_says_is_compared_to_the_byte(role: Any, change: Any) -> None:
    """The equivalences are those of our replies, and of nothing else."""
    text = '{"a":1}<think>hm</think>'
    messages = [
        Message(role, (ToolResult("call_1", said) if role == "tool" else Text(said),)) for said in (text, change(text))
    ]
    assert len({history_keys((message,))[-1] for message in messages}) == 2


def test_the_document_lists_each_of_them() -> None:
    """By name, in one table, with who was seen to do it; and nothing that has no test."""
    rows = re.findall(r"^\| ([^|`]+?) \|", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    assert rows[0] == "equivalence"
    assert rows[2:] == [*EQUIVALENCES]
