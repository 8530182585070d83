"""Whether a chat template drops earlier reasoning when a message follows, as it is seen on probes."""

from __future__ import annotations

import pytest

from polar_mitm.conversation import Message, Text, ToolResult
from polar_mitm.tokens import Template
from polar_mitm.tokens.retention import POLICIES, PRESERVE, rewrites
from tests.mitm.tokens.chatml import CHATML, byte_tokenizer

ASKED = (Message("user", (Text("And now?"),)),)
RESULT = (Message("tool", (ToolResult("call_1", "a.txt"),)),)
REFUSING = "{{ raise_exception('no') }}"
SHOWS_LAST = (  # a template with a field for reasoning, which it writes for the last message only
    "{% for m in messages %}{{ m['role'] }}:{% if loop.last and m['reasoning_content'] %}"
    "{{ m['reasoning_content'] }}{% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"
)


def test_preserve_is_the_first_policy() -> None:
    """And the default of everything."""
    assert POLICIES == (PRESERVE, "template") == ("preserve", "template")


@pytest.mark.parametrize(("new", "drops"), [(ASKED, True), (RESULT, False), ((*RESULT, *ASKED), True)])
def test_qwen3_drops_reasoning_once_the_user_speaks(qwen3: Template, new: tuple[Message, ...], drops: bool) -> None:  # noqa: FBT001 - parametrised
    """Within a tool turn it keeps it."""
    tokenizer = qwen3._tokenizer  # pyright: ignore[reportPrivateUsage] - the tokenizer that was loaded once
    assert rewrites(tokenizer, new) is drops


@pytest.mark.parametrize(
    ("template", "drops"), [(CHATML, False), (SHOWS_LAST, True), (REFUSING, True)], ids=["plain", "last", "refusing"]
)
def test_a_template_is_judged_by_what_it_writes(template: str, drops: bool) -> None:  # noqa: FBT001 - parametrised
    """One that knows no reasoning drops none; of one that refuses nothing is known."""
    assert rewrites(byte_tokenizer(template), ASKED) is drops


def test_under_preserve_nothing_is_written_anew() -> None:
    """Whatever the template does."""
    tokenizer = byte_tokenizer(SHOWS_LAST)
    assert Template(tokenizer).rewrites(ASKED) is False
    assert Template(tokenizer, "template").rewrites(ASKED) is True
