"""Rendering, bridging and reading: over Qwen3's typed renderer, and over a template that has none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from polar_mitm.conversation import Message, Part, Reasoning, Text, Tool, ToolCall, ToolResult
from polar_mitm.errors import BadRequest
from polar_mitm.tokens import Template, Tokens, load
from tests.mitm.tokens.chatml import CHATML, COUNTING, REFUSING, byte_tokenizer

RUN = Tool("run", "runs", '{"type":"object","properties":{"command":{"type":"string"}}}')
PATCH = Tool("patch", "patches", "", custom=True)
TOOLS = (RUN, PATCH)
ASKED = Message("user", (Text("Look."),))
CALLED = Message("assistant", (Text("I look."), ToolCall("call_1", "run", '{"command":"ls"}')))
RESULT = Message("tool", (ToolResult("call_1", "a.txt\n"),))
SAMPLED = 'I look.\n<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'

text_of_a_message = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=30)


@pytest.fixture(scope="module")
def judge(qwen3_folder: Path) -> Tokenizer:
    """The tokenizer without any of our code or of transformers'."""
    return Tokenizer.from_file(str(qwen3_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def chatml() -> Template:
    """A template without a typed renderer."""
    return Template(byte_tokenizer(CHATML))


def ids(judge: Tokenizer, text: str) -> Tokens:
    return np.array(judge.encode(text, add_special_tokens=False).ids, np.int32)


def user(text: str) -> Message:
    return Message("user", (Text(text),))


# --- rendering ----------------------------------------------------------------------------------------------------


def test_a_conversation_is_rendered_as_int32(qwen3: Template, judge: Tokenizer) -> None:
    """System, user and the head of the assistant's turn, in the model's own special tokens."""
    prompt = qwen3.render((Message("system", (Text("Be brief."),)), ASKED), ())
    assert prompt.dtype == np.int32
    assert judge.decode(prompt.tolist(), skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tools_and_results_are_rendered(qwen3: Template, judge: Tokenizer) -> None:
    """A free-form tool is shown to the model as a function of one string."""
    prompt = judge.decode(qwen3.render((ASKED, CALLED, RESULT), TOOLS).tolist(), skip_special_tokens=False)
    assert '{"name": "run", "arguments": {"command": "ls"}}' in prompt
    assert "<tool_response>\na.txt\n\n</tool_response>" in prompt
    assert '"name": "patch"' in prompt
    assert '"input": {"type": "string"}' in prompt


def test_the_stop_ids_end_a_turn(qwen3: Template, judge: Tokenizer) -> None:
    """Qwen3 stops at the end of a turn and of a text."""
    assert set(qwen3.stop_ids) == set(ids(judge, "<|im_end|><|endoftext|>").tolist())


def test_the_vocabulary_bounds_every_id(qwen3: Template, judge: Tokenizer) -> None:
    """An id below it is valid, special tokens included."""
    assert qwen3.vocabulary == judge.get_vocab_size(with_added_tokens=True)


def test_encode_adds_nothing_and_decode_hides_nothing(qwen3: Template) -> None:
    """Text to ids and back, special tokens included."""
    text = "naïve 北京 🧭<|im_end|>\n"
    assert qwen3.decode(qwen3.encode(text)) == text


def test_a_history_that_the_template_refuses_is_a_bad_request() -> None:
    """The harness is told, in the template's words."""
    with pytest.raises(BadRequest, match="chat template refuses"):
        Template(byte_tokenizer(REFUSING)).render((ASKED,), ())


@pytest.mark.parametrize("at", ["render", "bridge"])
def test_half_a_surrogate_pair_cannot_be_encoded(qwen3: Template, at: str) -> None:
    """JSON can carry one, a tokenizer cannot read it: refused when rendered, and no bridge is made over it."""
    half = user("\ud83d")
    if at == "render":
        with pytest.raises(BadRequest, match="refuses"):
            qwen3.render((half,), ())
    else:
        prompt = qwen3.render((ASKED,), TOOLS)
        assert qwen3.bridge(prompt, np.array([1], np.int32), (ASKED, CALLED, half), 2, TOOLS) is None


def test_arguments_that_are_no_json_are_rendered_as_they_are(qwen3: Template, judge: Tokenizer) -> None:
    """A harness may send back what the model got wrong."""
    wrong = Message("assistant", (ToolCall("call_1", "run", "{oops"),))
    assert "{oops" in judge.decode(qwen3.render((ASKED, wrong, RESULT), TOOLS).tolist())


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """transformers' own error, before any call is taken."""
    with pytest.raises((OSError, ValueError)):
        load(tmp_path)


# --- bridging -----------------------------------------------------------------------------------------------------


def test_a_bridge_keeps_the_parents_ids_and_adds_the_new_messages(qwen3: Template, judge: Tokenizer) -> None:
    """What was sampled stands as it was sampled; only what follows is encoded."""
    prompt, output = qwen3.render((ASKED,), TOOLS), ids(judge, SAMPLED)
    longer = qwen3.bridge(prompt, output, (ASKED, CALLED, RESULT), 2, TOOLS)
    assert longer is not None
    assert np.array_equal(longer[: len(prompt) + len(output)], np.concatenate([prompt, output]))
    assert judge.decode(longer[len(prompt) + len(output) :].tolist(), skip_special_tokens=False) == (
        "\n<|im_start|>user\n<tool_response>\na.txt\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_bridge_keeps_a_sample_that_no_encoder_would_give(qwen3: Template, judge: Tokenizer) -> None:
    """Letter by letter is not how this text is encoded, but how it was sampled."""
    letters = np.concatenate([ids(judge, c) for c in "hello"])
    output = np.concatenate([letters, ids(judge, "<|im_end|>")])
    prompt = qwen3.render((ASKED,), ())
    history = (ASKED, Message("assistant", (Text("hello"),)), user("more"))
    longer = qwen3.bridge(prompt, output, history, 2, ())
    assert longer is not None
    assert np.array_equal(longer[len(prompt) : len(prompt) + len(output)], output)
    assert not np.array_equal(longer, qwen3.render(history, ()))


def test_a_bridge_keeps_reasoning_that_a_render_would_drop(qwen3: Template, judge: Tokenizer) -> None:
    """Qwen3's template takes earlier thinking out: the sampled context keeps it."""
    prompt, output = qwen3.render((ASKED,), ()), ids(judge, "<think>\nhm\n</think>\n\nHello.<|im_end|>")
    history = (ASKED, Message("assistant", (Text("Hello."),)), user("more"))
    longer = qwen3.bridge(prompt, output, history, 2, ())
    assert longer is not None
    assert "hm" in judge.decode(longer.tolist())


def test_a_cut_sample_gets_its_missing_end(qwen3: Template, judge: Tokenizer) -> None:
    """A sample that ended by length has no end of turn: the bridge adds it, as context."""
    prompt, output = qwen3.render((ASKED,), ()), ids(judge, "Hello")
    history = (ASKED, Message("assistant", (Text("Hello"),)), user("more"))
    longer = qwen3.bridge(prompt, output, history, 2, ())
    assert longer is not None
    rest = judge.decode(longer[len(prompt) + len(output) :].tolist(), skip_special_tokens=False)
    assert rest == "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


def test_words_of_the_assistant_that_were_not_sampled_have_no_bridge(qwen3: Template, judge: Tokenizer) -> None:
    """A reply that another model gave is context that must be rendered."""
    prompt, output = qwen3.render((ASKED,), TOOLS), ids(judge, SAMPLED)
    history = (ASKED, CALLED, RESULT, Message("assistant", (Text("Done."),)), user("more"))
    assert qwen3.bridge(prompt, output, history, 2, TOOLS) is None


@given(st.lists(text_of_a_message, min_size=1, max_size=4), text_of_a_message)
def test_the_difference_bridge_is_the_templates_own_rendering(chatml: Template, texts: list[str], reply: str) -> None:
    """For a template that only appends, parent + reply + suffix is what it would render, token by token."""
    history = tuple(user(text) for text in texts)
    prompt = chatml.render(history, ())
    output = np.array([*chatml.encode(reply), *chatml.stop_ids], np.int32)
    longer = (*history, Message("assistant", (Text(reply),)), user("and\n  now?"))
    bridged = chatml.bridge(prompt, output, longer, len(history) + 1, ())
    assert bridged is not None
    assert bridged.tolist() == chatml.render(longer, ()).tolist()


def test_the_difference_bridge_of_a_cut_sample_adds_the_end(chatml: Template) -> None:
    """The same without the stop token: the bridge ends the turn."""
    prompt, output = chatml.render((ASKED,), ()), np.array(chatml.encode("Hel"), np.int32)
    longer = (ASKED, Message("assistant", (Text("Hel"),)), user("more"))
    bridged = chatml.bridge(prompt, output, longer, 2, ())
    assert bridged is not None
    assert bridged.tolist() == chatml.render(longer, ()).tolist()


def test_a_template_that_is_not_append_only_has_no_bridge() -> None:
    """Every call is then a full render."""
    counting = Template(byte_tokenizer(COUNTING))
    assert not counting.bridges
    prompt = counting.render((ASKED,), ())
    assert counting.bridge(prompt, np.array([257], np.int32), (ASKED, CALLED, RESULT), 2, ()) is None


# --- reading ------------------------------------------------------------------------------------------------------

CALL = ToolCall("", "run", '{"command": "ls é 🧭"}')
SPOKEN_CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls é 🧭"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("sampled", "parts"),
    [
        pytest.param("Hello.<|im_end|>", (Text("Hello."),), id="text"),
        pytest.param("naïve 北京 🧭", (Text("naïve 北京 🧭"),), id="unicode"),
        pytest.param("", (), id="nothing"),
        pytest.param("  \n<|im_end|>", (), id="white space"),
        pytest.param("<think>\nhm\n</think>\n\nYes.<|im_end|>", (Reasoning("hm"), Text("Yes.")), id="reasoning"),
        pytest.param(f"{SPOKEN_CALL}<|im_end|>", (CALL,), id="a call"),
        pytest.param(f"I look.\n{SPOKEN_CALL}<|im_end|>", (Text("I look."), CALL), id="text and a call"),
        pytest.param(f"{SPOKEN_CALL}\n{SPOKEN_CALL}<|im_end|>", (CALL, CALL), id="two calls"),
        pytest.param(
            '<tool_call>\n{"name": "patch", "arguments": {"input": "*** é\\n"}}\n</tool_call><|im_end|>',
            (ToolCall("", "patch", "*** é\n", custom=True),),
            id="the input of a free-form tool",
        ),
        pytest.param(
            '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call><|im_end|>',
            (Text('<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'),),
            id="a tool that is not offered",
        ),
        pytest.param(
            'Look:\n<tool_call>\n{"name": "run", "arguments": {oops}}\n</tool_call><|im_end|>',
            (Text('Look:\n<tool_call>\n{"name": "run", "arguments": {oops}}\n</tool_call>'),),
            id="a malformed call is text",
        ),
        pytest.param(
            'Look:\n<tool_call>\n{"name": "run", "argu', (Text('Look:\n<tool_call>\n{"name": "run", "argu'),),
            id="a truncated call is text, and its end is not invented",
        ),
    ],
)  # fmt: skip
def test_a_sample_is_read(qwen3: Template, judge: Tokenizer, sampled: str, parts: tuple[Part, ...]) -> None:
    """Reasoning, text and tool calls, as sampled: nothing is repaired."""
    prompt = qwen3.render((ASKED,), TOOLS)
    assert qwen3.parse(ids(judge, sampled), prompt, TOOLS).parts == parts


def test_open_reasoning_is_told(qwen3: Template, judge: Tokenizer) -> None:
    """A sample that ends while thinking is reasoning so far."""
    read = qwen3.parse(ids(judge, "<think>\nhm"), qwen3.render((ASKED,), ()), ())
    assert read.parts == (Reasoning("hm"),)
    assert read.reasoning_open


@pytest.mark.parametrize(("sampled", "begun"), [("I look.", False), ("I look.\n<tool_call>\n{", True)])
def test_the_beginning_of_a_call_is_told(qwen3: Template, judge: Tokenizer, sampled: str, *, begun: bool) -> None:
    """From there on nothing is streamed."""
    assert qwen3.parse(ids(judge, sampled), qwen3.render((ASKED,), TOOLS), TOOLS).has_tool_call is begun


@given(st.recursive(st.text(max_size=5) | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
def test_any_json_comes_back_as_the_arguments_that_were_sampled(qwen3: Template, value: object) -> None:
    """Numbers, quotes, control characters and any script."""
    said = json.dumps({"name": "run", "arguments": {"command": value}}, ensure_ascii=False)
    output = np.array(qwen3.encode(f"<tool_call>\n{said}\n</tool_call><|im_end|>"), np.int32)
    (call,) = qwen3.parse(output, np.array([1], np.int32), TOOLS).parts
    assert isinstance(call, ToolCall)
    assert json.loads(call.arguments) == {"command": value}


def test_a_template_without_a_renderer_reads_text(chatml: Template) -> None:
    """No family, no tool calls: the text without its end."""
    output = np.array([*chatml.encode(" Hello. <tool_call>{}</tool_call>"), *chatml.stop_ids], np.int32)
    read = chatml.parse(output, chatml.render((ASKED,), ()), ())
    assert read.parts == (Text("Hello. <tool_call>{}</tool_call>"),)
    assert not read.has_tool_call
