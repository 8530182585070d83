"""Prompts are read from their tokens by code that is not the project's own, and compared with what was asked."""

import pytest

from polar_mitm.conversation import Conversation, Message, Reasoning, Text, Tool, ToolCall, ToolResult
from tests.harness.reading import asked, read

REQUEST = Conversation(
    "m",
    (
        Message("system", (Text("Be brief."),)),
        Message("user", (Text("Look. "),)),
        Message("assistant", (Reasoning("Where?"), Text("I look."), ToolCall("1", "run", '{"command":"ls"}'))),
        Message("tool", (ToolResult("1", "a.txt\n"),)),
    ),
    tools=(Tool("run", "runs", "{}"),),
)
PROMPT = (
    "<|im_start|>system\nBe brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user query."
    '\n\nTools:\n<tools>\n{"type": "function", "function": {"name": "run"}}\n</tools>\n\nHow to.<|im_end|>\n'
    "<|im_start|>user\nLook. <|im_end|>\n"
    "<|im_start|>assistant\n<think>\nWhere? I wonder.\n</think>\n\n  I look. \n<tool_call>\n"
    '{"name": "run",  "arguments": {"command":   "ls"}}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\na.txt\n\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)


def test_a_prompt_that_says_what_was_asked_reads_alike():
    """The spelling of a reply and its reasoning do not count."""
    assert read(PROMPT) == asked(REQUEST)


@pytest.mark.parametrize(
    ("said", "other"),
    [
        ("Be brief.", "Be brief!"),
        ("Look. <", "Look.<"),
        ("I look.", "I looked."),
        ('"ls"', '"ls -a"'),
        ("a.txt\n\n<", "a.txt\n<"),
        ('"name": "run"}}\n</tools>', '"name": "walk"}}\n</tools>'),
    ],
)
def test_a_prompt_that_says_anything_else_does_not(said, other):
    """System text, user text, reply, arguments, result and tools, to the byte where it is not the model's own."""
    changed = PROMPT.replace(said, other)
    assert changed != PROMPT
    assert read(changed) != asked(REQUEST)


def test_a_prompt_that_asks_for_no_reply_is_an_error():
    """The generation prompt is a part of it."""
    with pytest.raises(AssertionError, match="no reply"):
        read(PROMPT.removesuffix("<|im_start|>assistant\n"))
