"""The scripted conversations: what makes them fit to judge by."""

from __future__ import annotations

import json

import pytest

from polar_mitm.conversation import Reasoning, Text, ToolCall, ToolResult
from polar_mitm.tokens import script


@pytest.mark.parametrize("step", script.ALL, ids=[step.name for step in script.ALL])
def test_the_first_word_of_each_text_is_found_in_no_other(step: script.Step) -> None:
    """So a rendering alone tells where a message ended up."""
    texts = [p.text for m in step.request for p in m.parts if isinstance(p, Text | Reasoning | ToolResult)]
    texts += [
        str(v)
        for m in step.request
        for p in m.parts
        if isinstance(p, ToolCall)
        for v in json.loads(p.arguments).values()
    ]
    words = [text.split()[0] for text in texts]
    assert all(sum(word in text for text in texts) == 1 for word in words)


def test_every_step_has_a_name_of_its_own() -> None:
    """Reports name steps."""
    assert len({step.name for step in script.ALL}) == len(script.ALL)
