"""The beginning of a forced tool call."""

from __future__ import annotations

import numpy as np
import pytest

from polar_mitm.conversation import Message, Text, Tool, ToolCall
from polar_mitm.errors import BadRequest
from polar_mitm.tokens import Template
from tests.mitm.tokens.chatml import CHATML, byte_tokenizer

RUN = Tool("run", "runs", '{"type":"object"}')
LOOK = Tool("look", "looks", '{"type":"object"}')
RUSH = Tool("rush", "rushes", '{"type":"object"}')
PATCH = Tool("patch", "patches", "", custom=True)
THOUGHTLESS = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("forced", "tools", "beginning"),
    [
        pytest.param("run", (RUN, LOOK), '{"name": "run", "arguments":', id="this one"),
        pytest.param("", (RUN, LOOK), '{"name": "', id="any of several"),
        pytest.param("", (RUN,), '{"name": "run", "arguments":', id="any of one"),
        pytest.param("patch", (RUN, PATCH), '{"name": "patch", "arguments": {"input": "', id="a free-form one"),
    ],
)  # fmt: skip
def test_a_call_is_begun_as_the_template_writes_it(
    qwen3: Template, forced: str, tools: tuple[Tool, ...], beginning: str
) -> None:
    """Qwen3 writes a turn without thoughts with empty marks; the arguments, and a free name, are the model's."""
    assert qwen3.decode(qwen3.forced(forced, tools)) == f"{THOUGHTLESS}<tool_call>\n{beginning}"


def test_no_tool_is_ruled_out_when_any_may_be_called(qwen3: Template) -> None:
    """The beginning is common to all of them, not to the first two."""
    begun = qwen3.decode(qwen3.forced("", (RUN, RUSH, LOOK)))
    assert begun == f'{THOUGHTLESS}<tool_call>\n{{"name": "'


def test_what_is_sampled_behind_it_is_read_as_that_call(qwen3: Template) -> None:
    """Beginning and rest together are a call."""
    rest = np.array(qwen3.encode(' {"command": "ls"}}\n</tool_call>'), np.int32)
    prompt = qwen3.render((Message("user", (Text("Look."),)),), (RUN,))
    read = qwen3.parse(np.concatenate([qwen3.forced("run", (RUN,)), rest]), prompt, (RUN,))
    assert read.parts == (ToolCall("", "run", '{"command": "ls"}'),)


def test_a_tool_that_is_not_offered_cannot_be_forced(qwen3: Template) -> None:
    """The harness is told which are."""
    with pytest.raises(BadRequest, match=r"'fly' is not among the offered tools \['run'\]"):
        qwen3.forced("fly", (RUN,))


def test_a_template_without_tools_cannot_force_one() -> None:
    """Its rendering of a call is empty: nothing would be forced."""
    with pytest.raises(BadRequest, match="cannot be forced with this model's chat template"):
        Template(byte_tokenizer(CHATML)).forced("run", (RUN,))
