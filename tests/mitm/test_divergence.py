"""How one context leaves another: each class of drift and of departure, and beside it what is not of that class."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.conversation import Message, Reasoning, Text, Tool, ToolCall, ToolResult
from polar_mitm.divergence import Context, Departure, departure, drift, shared_prefix
from polar_mitm.tokens import Template

HEAD = "<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n"
TAIL = "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls", "n": 1}}\n</tool_call>'


def ids(template: Template, text: str) -> np.ndarray:
    return np.array(template.encode(text), np.int32)


@pytest.mark.parametrize(("b", "shared"), [([1, 2, 3], 3), ([1, 2], 2), ([1, 9, 3], 1), ([], 0), ([1, 2, 3, 4], 3)])
def test_the_shared_prefix_is_counted_in_tokens(b: list[int], shared: int) -> None:
    """Up to the first difference, or the end of the shorter."""
    assert shared_prefix(np.array([1, 2, 3], np.int32), np.array(b, np.int32)) == shared


# --- drift --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "rendered", "kind"),
    [
        pytest.param("<think>\nhm\n</think>\n\nYes.", "Yes.", "reasoning", id="reasoning that is gone"),
        pytest.param(
            "<think>\nhm, yes\n</think>\n\nYes.", "<think>\nhm,\n</think>\n\nYes.", "reasoning", id="trimmed reasoning"
        ),
        pytest.param("<think>\nhm\n</think>\n\nYes.", "<think>\nno\n</think>\n\nYes.", "other", id="another reasoning"),
        pytest.param(
            "<think>\nhm\n</think>\n\nYes.", "<think>\nhm\n</think>\nYes.", "white_space", id="a blank line less"
        ),
        pytest.param("Yes. \n", "Yes.", "white_space", id="white space at the end"),
        pytest.param("Yes.", "Yes!", "other", id="another character"),
        pytest.param(
            CALL, CALL.replace('{"command": "ls", "n": 1}', '{"n": 1, "command": "ls"}'), "arguments", id="other order"
        ),
        pytest.param(
            CALL.replace("ls", "naïve"), CALL.replace("ls", "na\\u00efve"), "arguments", id="escaped characters"
        ),
        pytest.param(CALL, CALL.replace("1}", "2}"), "other", id="another argument"),
        pytest.param(CALL, CALL.replace('{"command"', '{ "command"'), "white_space", id="white space in JSON"),
        pytest.param("Yes.", "<think>\n\n</think>\n\nYes.", "template", id="an empty block of the template's"),
        pytest.param("Yes.", "<think>\nhm\n</think>\n\nYes.", "other", id="reasoning that was never sampled"),
    ],
)
def test_the_class_of_a_drift_is_told_by_the_turn_in_which_it_begins(
    qwen3: Template, sampled: str, rendered: str, kind: str
) -> None:
    """What stands behind the turn does not count: it may drift in its own way."""
    found = drift(qwen3, ids(qwen3, HEAD + sampled + TAIL), ids(qwen3, HEAD + rendered + TAIL + " more"))
    assert found is not None
    assert found.kind == kind


def test_equal_text_of_other_tokens_is_retokenized(qwen3: Template) -> None:
    """A sample need not be the tokenizer's own encoding of its text."""
    whole = ids(qwen3, HEAD + "There")
    apart = np.concatenate([ids(qwen3, HEAD), ids(qwen3, "Th"), ids(qwen3, "ere")])
    found = drift(qwen3, apart, whole)
    assert found is not None
    assert (found.kind, found.at) == ("retokenized", len(ids(qwen3, HEAD)))


def test_equal_prompts_do_not_drift(qwen3: Template) -> None:
    """Nothing is said of them."""
    assert drift(qwen3, ids(qwen3, HEAD), ids(qwen3, HEAD)) is None


def test_a_drift_shows_both_texts_around_its_place(qwen3: Template) -> None:
    """Markers included, and no more than a few lines."""
    long = "word " * 500
    prompt, rendered = (ids(qwen3, HEAD + long + end + TAIL) for end in ("<think>\nhm\n</think>\n\nYes.", "Yes."))
    found = drift(qwen3, prompt, rendered)
    assert found is not None
    value = json.loads(found.json())
    assert list(value) == ["class", "at", "sampled", "rendered"]
    assert value["at"] == shared_prefix(prompt, rendered)
    assert "word <think>\nhm\n</think>\n\nYes.<|im_end|>" in value["sampled"]
    assert "word Yes.<|im_end|>" in value["rendered"]
    assert len(value["sampled"]) < 300


@given(a=st.lists(st.integers(0, 500), max_size=40), b=st.lists(st.integers(0, 500), max_size=40))
def test_any_two_sequences_have_a_drift_or_are_equal(qwen3: Template, a: list[int], b: list[int]) -> None:
    """Whatever the tokens are."""
    found = drift(qwen3, np.array(a, np.int32), np.array(b, np.int32))
    assert (found is None) == (a == b)


# --- departures ---------------------------------------------------------------------------------------------------

SYSTEM = Message("system", (Text("Be brief."),))
ASKED = Message("user", (Text("Look for the file with the notes."),))
CALLED = Message("assistant", (Reasoning("Hm."), ToolCall("c1", "run", '{"command":"ls"}')))
RESULT = Message("tool", (ToolResult("c1", "notes.txt\nother.txt\n"),))
SAID = Message("assistant", (Text("It is notes.txt."),))
MORE = Message("user", (Text("And now read it."),))
REMINDER = "<system-reminder>\nThe list of things to do is empty.\n</system-reminder>"
OLD = (SYSTEM, ASKED, CALLED, RESULT, SAID)
RUN, LOOK = Tool("run", "Runs.", "{}"), Tool("look", "Looks.", "{}", namespace="files")
SUMMARY = "<summary>\nThe user looks for a file with notes.\nIt is called notes.txt, beside other.txt.\n</summary>"


def left(
    template: Template, *now: Message, tools: tuple[Tool, ...] = (RUN,), summaries: tuple[str, ...] = ()
) -> Departure:
    """How these messages leave `OLD`."""

    def context(messages: tuple[Message, ...], offered: tuple[Tool, ...]) -> Context:
        return Context(template.render(messages, offered), messages, offered)

    return departure(template, "call", context(OLD, (RUN,)), context(now, tools), summaries=summaries)


def user(*texts: str) -> Message:
    return Message("user", tuple(map(Text, texts)))


@pytest.mark.parametrize(
    ("now", "kind"),
    [
        pytest.param(
            (SYSTEM, Message("user", (*ASKED.parts, Text(REMINDER))), CALLED, RESULT, SAID, MORE),
            "reminder",
            id="block",
        ),
        pytest.param((SYSTEM, ASKED, CALLED, RESULT, user(REMINDER), SAID, MORE), "reminder", id="message of blocks"),
        pytest.param(
            (SYSTEM, ASKED, CALLED, Message("tool", (ToolResult("c1", f"notes.txt\nother.txt\n\n{REMINDER}"),)), SAID),
            "reminder",
            id="block in a result",
        ),
        pytest.param(
            (SYSTEM, user("Look there.", REMINDER), CALLED, RESULT, SAID, MORE), "edited", id="block and edit"
        ),
        pytest.param((SYSTEM, user("Look there."), CALLED, RESULT, SAID, MORE), "edited", id="the user's words"),
        pytest.param(
            (SYSTEM, ASKED, CALLED, Message("tool", (ToolResult("c1", "notes.txt\n"),)), SAID, MORE),
            "edited",
            id="a result",
        ),
        pytest.param((SYSTEM, ASKED, SAID, MORE), "removed", id="a tool turn"),
        pytest.param((ASKED, CALLED, RESULT, SAID, MORE), "removed", id="the system's words"),
        pytest.param((SYSTEM, ASKED), "removed", id="the end"),
        pytest.param(
            (SYSTEM, ASKED, Message("assistant", (*CALLED.parts, *SAID.parts)), MORE), "removed", id="between replies"
        ),
        pytest.param((SYSTEM, user("Go on."), user(REMINDER), MORE), "edited", id="nothing of it is there"),
        pytest.param((SYSTEM, ASKED, user("Wait."), CALLED, RESULT, SAID, MORE), "other", id="words between"),
        pytest.param((*OLD, MORE), "other", id="all of it is there"),
    ],
)
def test_the_class_of_a_departure_is_told_by_the_first_message_that_differs(
    qwen3: Template, now: tuple[Message, ...], kind: str
) -> None:
    """What cannot be told is other."""
    assert left(qwen3, *now).kind == kind


def test_a_message_with_the_summary_of_a_compaction_replaced_history(qwen3: Template) -> None:
    """Known by the words of the session's own summary, the tags around it aside."""
    given = user(
        "Another model worked on this:\n\n" + SUMMARY.replace("<summary>", "").replace("</summary>", ""), "Go on."
    )
    assert left(qwen3, SYSTEM, given, summaries=(SUMMARY,)).kind == "compaction"
    assert left(qwen3, SYSTEM, given).kind == "edited"
    assert left(qwen3, SYSTEM, user("Go on."), summaries=(SUMMARY,)).kind == "edited"
    assert left(qwen3, SYSTEM, user("Go on."), summaries=("",)).kind == "edited"


@pytest.mark.parametrize(
    ("tools", "was", "now"),
    [
        ((RUN, LOOK), "", "added: files.look"),
        ((), "removed: run", ""),
        ((Tool("run", "Runs it.", "{}"),), "changed: run", "changed: run"),
        ((LOOK,), "removed: run", "added: files.look"),
    ],
)
def test_a_change_of_the_tools_names_them(qwen3: Template, tools: tuple[Tool, ...], was: str, now: str) -> None:
    """Those that went, came, and changed."""
    found = left(qwen3, *OLD, MORE, tools=tools)
    assert (found.kind, found.was, found.now) == ("tools", was, now)


def test_another_order_of_the_tools_is_named(qwen3: Template) -> None:
    """It changes the prompt like any other change."""
    a, b = (RUN, LOOK), (LOOK, RUN)
    contexts = [Context(qwen3.render(OLD, tools), OLD, tools) for tools in (a, b)]
    found = departure(qwen3, "call", *contexts)
    assert (found.kind, found.was, found.now) == ("tools", "order: run, files.look", "order: files.look, run")


def test_a_departure_shows_both_texts_around_its_place(qwen3: Template) -> None:
    """As the column holds it."""
    edited = Message("tool", (ToolResult("c1", "notes.txt\nfather.txt\n"),))
    value = json.loads(left(qwen3, SYSTEM, ASKED, CALLED, edited, SAID).json())
    assert list(value) == ["class", "at", "call", "was", "now", "restored"]
    assert (value["class"], value["call"], value["restored"]) == ("edited", "call", 0)
    assert "other.txt" in value["was"]
    assert "father.txt" in value["now"]
    assert "<|im_start|>" in value["now"]


def test_the_texts_show_the_edit_also_where_the_tokens_part_earlier(qwen3: Template) -> None:
    """The template leaves out the reasoning before the user's new words, in front of what was edited."""
    edited = Message("tool", (ToolResult("c1", "x" * 2000 + "father.txt\n"),))
    found = left(qwen3, SYSTEM, ASKED, CALLED, edited, SAID, MORE)
    assert found.kind == "edited"
    assert "xxxx" in found.now
    assert found.was.startswith("notes.txt")
