"""Requests, models and errors of Anthropic Messages."""

import json

import pytest
from anthropic.types import ModelInfo

from polar_mitm.conversation import Message, Reasoning, Sampling, Text, Tool, ToolResult
from polar_mitm.errors import (
    BadRequest,
    BudgetUsed,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    NotFound,
    PolarError,
    Sealed,
    TooLarge,
    Unauthorized,
)
from polar_mitm.wire.anthropic import AnthropicMessages
from tests.mitm.wire.replies import CORE, REQUEST, began, events, golden

ANTHROPIC = AnthropicMessages()
HI = {"role": "user", "content": "hi"}


def _decode(headers=None, **body):
    return ANTHROPIC.decode({"model": "m", "max_tokens": 9, "messages": [HI], **body}, headers or {})


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (Sealed("x"), 403, "permission_error"),
        (NotFound("x"), 404, "not_found_error"),
        (TooLarge("x"), 413, "request_too_large"),
        (EngineError("x"), 500, "api_error"),
        (EngineUnavailable("x"), 529, "overloaded_error"),
    ],
)
def test_an_error_has_anthropics_shape(error: PolarError, status: int, kind: str):
    """Plain and in a stream."""
    assert ANTHROPIC.status(error) == status
    assert ANTHROPIC.error(error) == {"type": "error", "error": {"type": kind, "message": "x"}}
    assert events(began(ANTHROPIC.encoder(REQUEST, CORE)).fail(error)) == [("error", ANTHROPIC.error(error))]


def test_an_overflow_is_worded_as_anthropic_does():
    """Claude Code compacts by these words."""
    error = ANTHROPIC.error(ContextOverflow(5000, 4096))["error"]
    assert error == {"type": "invalid_request_error", "message": "prompt is too long: 5000 tokens > 4096 maximum"}


def test_a_used_budget_is_worded_as_an_account_without_credit():
    """A 400, which ends Claude Code at once; a 429 is sent again for minutes."""
    error = BudgetUsed("session 's' has used its 2 turns")
    assert ANTHROPIC.status(error) == 400
    body = ANTHROPIC.error(error)["error"]
    assert body["type"] == "invalid_request_error"
    assert body["message"].startswith("Your credit balance is too low to access the Anthropic API.")


def test_a_claude_code_turn_is_canonical():
    """System blocks first, a system message where it stood, thinking, text, call, result."""
    request = golden("claude-code-2.1.332.tool-turn")
    conversation = ANTHROPIC.decode(request["body"], request["headers"])
    assert [message.role for message in conversation.messages] == ["system", "user", "system", "assistant", "tool"]
    reasoning, text, call = conversation.messages[3].parts
    assert isinstance(reasoning, Reasoning)
    assert text == Text("I will write it.")
    assert json.loads(call.arguments)["command"].startswith("printf 'bonjour, café'")
    assert conversation.messages[4].parts == (ToolResult(call.id, "wrote 0: bonjour, café"),)
    core = call.id.removeprefix("toolu_")[:-2]
    assert conversation.echoes == (core, call.id, call.id, f"msg_{core}")
    assert {"metadata", "thinking", "messages.content.cache_control", "output_config.effort"} <= set(
        conversation.fidelity
    )


def test_the_agent_id_is_the_thread():
    """Claude Code names its sub-agents in a header."""
    request = golden("claude-code-2.1.332.subagent")
    assert ANTHROPIC.decode(request["body"], request["headers"]).thread == request["headers"]["x-claude-code-agent-id"]


def test_the_billing_block_is_dropped():
    """It changes on every turn; with it gone the system prompt is the same."""
    blocks = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=1;", "You are", "good")]
    assert _decode(system=blocks).messages[0] == Message("system", (Text("You are"), Text("good")))
    assert _decode(system=blocks[:1]).messages == (Message("user", (Text("hi"),)),)


def test_tools_and_sampling_are_read():
    """Server tools are left out and listed; the output format is a schema."""
    conversation = _decode(
        tools=[
            {"name": "f", "description": "d", "input_schema": {"b": 1, "a": 2}},
            {"type": "web_search_20250305", "name": "s"},
        ],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stream=True,
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert conversation.tools == (Tool("f", "d", '{"b":1,"a":2}'),)
    assert conversation.sampling == Sampling(0.5, 0.9, 4, 9, None, '{"type":"object"}')
    assert conversation.stream
    assert conversation.fidelity == ("tools[web_search_20250305]",)
    assert _decode(tools=[{"name": "f", "input_schema": {}}], tool_choice={"type": "none"}).tools == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_sequences", ["x", " "]),
        ("stop_sequences", "x"),
        ("tool_choice", "auto"),
        ("max_tokens", 0),
        ("messages", []),
        ("messages", [HI, {"role": "assistant", "content": "I"}]),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "document", "source": {}}]}]),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("output_config", {"format": {"type": "json_schema"}}),
        ("output_config", {"format": {"type": "xml"}}),
        ("tools", [{"name": "f"}]),
    ],
)
def test_what_would_change_the_meaning_is_refused(field, value):
    """The error names the field."""
    with pytest.raises(BadRequest) as caught:
        _decode(**{field: value})
    assert field in f"{caught.value.field} {caught.value}"


def test_a_thread_is_refused_in_the_words_that_pi_understands():
    """It then sends the whole history."""
    with pytest.raises(BadRequest, match=r"^thread: Extra inputs are not permitted$"):
        _decode(thread={"type": "create"})


def test_a_prefilled_answer_is_refused_in_anthropics_words():
    """As its newer models do: the model cannot go on in the middle of a message."""
    with pytest.raises(BadRequest) as caught:
        _decode(messages=[HI, {"role": "assistant", "content": "I"}])
    assert ANTHROPIC.error(caught.value)["error"]["message"] == (
        "This model does not support assistant message prefill. The conversation must end with a user message."
    )


def test_a_place_is_written_with_dots():
    """As Anthropic names the fields of a request."""
    with pytest.raises(BadRequest) as caught:
        _decode(messages=[HI, {"role": "user", "content": [{"type": "text", "text": 7}]}])
    message = ANTHROPIC.error(caught.value)["error"]["message"]
    assert message == "messages.1.content.0.text: expected a string, got 7"


def test_the_models_are_listed_on_one_page():
    """Claude Code reads max_input_tokens."""
    listed = ANTHROPIC.models(["a", "b"], 4096)
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "b", False)
    model = ModelInfo.model_validate(listed["data"][0], strict=False)
    assert (model.id, model.max_input_tokens, model.type) == ("a", 4096, "model")
    assert ANTHROPIC.models([], 4096)["first_id"] is None


def test_counted_tokens_have_one_field():
    """The answer of count_tokens."""
    assert ANTHROPIC.counted(5) == {"input_tokens": 5}
