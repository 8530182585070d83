"""What counts as the same history, beside the listed equivalences (test_equivalences.py), and how it is hashed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.conversation import (
    Message,
    Part,
    Reasoning,
    Reply,
    Text,
    Tool,
    ToolCall,
    ToolResult,
    canonical,
    canonical_json,
    extend_key,
    history_keys,
    message_json,
    tools_key,
)

CALL = ToolCall("call_1", "run", '{"command":"ls","n":1}')
SAID = Message("assistant", (Reasoning("Let me look."), Text("I look."), CALL))


def assistant(*parts: Part) -> str:
    return canonical(Message("assistant", parts))


@pytest.mark.parametrize(
    "sent_back",
    [
        pytest.param((Text("I  look."), CALL), id="white space inside the text"),
        pytest.param((Text("I looked."), CALL), id="other text"),
        pytest.param(
            (Text("I look."), ToolCall("call_1", "run", '{"command":"ls","n":2}')), id="another argument value"
        ),
        pytest.param((Text("I look."), ToolCall("call_1", "run", '{"command":"ls","n":"1"}')), id="an argument's type"),
        pytest.param(
            (Text("I look."), ToolCall("call_1", "run", '{"command":"ls ","n":1}')), id="white space in an argument"
        ),
        pytest.param((Text("I look."), ToolCall("call_1", "write", CALL.arguments)), id="another tool"),
        pytest.param((Text("I look."),), id="a dropped call"),
        pytest.param((Text("I look."), CALL, CALL), id="a doubled call"),
    ],
)
def test_any_other_change_of_a_reply_is_an_edit(sent_back: tuple[Part, ...]) -> None:
    """What was said must be what was sampled."""
    assert assistant(*sent_back) != canonical(SAID)


@pytest.mark.parametrize("role", ["system", "user"])
def test_white_space_counts_in_what_the_harness_says(role: str) -> None:
    """Only the model's own text may be trimmed: the harness's text is compared to the byte."""
    plain = Message(role, (Text("go on"),))  # pyright: ignore[reportArgumentType] - parametrised literal
    padded = Message(role, (Text("go on "),))  # pyright: ignore[reportArgumentType] - parametrised literal
    assert canonical(plain) != canonical(padded)


@given(text=st.text(min_size=1, max_size=20), data=st.data())
def test_a_tool_result_edited_by_one_character_is_an_edit(text: str, data: st.DataObject) -> None:
    """A tool result is compared to the byte, its ends included."""
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters().filter(lambda c: c != text[at]))
    edited = text[:at] + other + text[at + 1 :]
    results = [Message("tool", (ToolResult("call_1", t),)) for t in (text, edited)]
    assert canonical(results[0]) != canonical(results[1])


def test_white_space_at_the_end_of_a_tool_result_is_an_edit() -> None:
    """A shell's last new line is part of what the model sees."""
    results = [Message("tool", (ToolResult("call_1", text),)) for text in ("a.txt\n", "a.txt")]
    assert canonical(results[0]) != canonical(results[1])


def test_a_tool_result_that_became_an_error_is_an_edit() -> None:
    """`is_error` counts."""
    results = [Message("tool", (ToolResult("call_1", "no", is_error=flag),)) for flag in (False, True)]
    assert canonical(results[0]) != canonical(results[1])


def test_the_call_id_of_a_tool_result_does_not_count() -> None:
    """Ids are the protocol's, the model does not see them in the order of the results."""
    results = [Message("tool", (ToolResult(call_id, "no"),)) for call_id in ("call_1", "toolu_1")]
    assert canonical(results[0]) == canonical(results[1])


def test_the_role_counts() -> None:
    """The same words from the user and from the model are two histories."""
    assert len({canonical(Message(role, (Text("hi"),))) for role in ("system", "user", "assistant")}) == 3


def test_where_a_users_text_is_cut_into_blocks_counts() -> None:
    """Blocks of the harness are joined by blank lines in the prompt, so another cut is another prompt."""
    assert canonical(Message("user", (Text("ab"),))) != canonical(Message("user", (Text("a"), Text("b"))))


def test_the_input_of_a_custom_tool_is_no_json() -> None:
    """Free-form input that happens to be JSON is compared as text, white space at its ends aside."""
    inputs = ['{"a":1}', ' {"a":1}\n', '{"a": 1}']
    keys = [assistant(ToolCall("c", "patch", text, custom=True)) for text in inputs]
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


@given(st.text(max_size=40))
def test_canonical_json_takes_any_text(text: str) -> None:
    """Arguments come from a model: text that is no JSON is itself, and nothing raises."""
    assert canonical_json(canonical_json(text)) == canonical_json(text)


def test_deeply_nested_arguments_are_compared_as_text() -> None:
    """Brackets nested beyond the parser's depth are no error."""
    deep = "[" * 100_000
    assert canonical_json(deep) == deep


def test_history_keys_are_chained() -> None:
    """Key i covers all messages up to i, so that equal ends of different histories differ."""
    asked, other = Message("user", (Text("a"),)), Message("user", (Text("b"),))
    keys = history_keys((asked, SAID))
    assert len(keys) == 2
    assert keys[1] == extend_key(keys[0], SAID)
    assert keys[1] != history_keys((other, SAID))[1]
    assert {len(key) for key in keys} == {16}


def test_half_a_surrogate_pair_has_a_key() -> None:
    """JSON can carry a lone surrogate; its history is hashed like any other."""
    assert len(history_keys((Message("user", (Text("\ud83d"),)),))[0]) == 16


def test_any_change_of_the_tools_changes_their_key() -> None:
    """Name, description, schema, order and name space are all part of the prompt."""
    run, look = Tool("run", "runs", "{}"), Tool("look", "looks", "{}")
    variants = [(run, look), (look, run), (run,), (Tool("run", "runs it", "{}"), look), ()]
    assert len({tools_key(tools) for tools in variants}) == len(variants)


def test_the_message_of_a_reply_is_what_a_faithful_harness_sends_back() -> None:
    """The reply's parts, said by the assistant."""
    assert Reply("id", SAID.parts, "tool_calls").message == SAID


def test_a_message_is_json_with_the_kind_of_each_part() -> None:
    """The calls table holds messages as JSON that names what each part is."""
    value = json.loads(json.dumps(message_json(SAID)))
    assert value["role"] == "assistant"
    assert [part["kind"] for part in value["parts"]] == ["reasoning", "text", "toolcall"]
    assert value["parts"][2]["arguments"] == CALL.arguments
