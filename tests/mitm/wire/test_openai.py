"""What OpenAI's two protocols share."""

import pytest
from openai.types import Model

from polar_mitm.conversation import Tool
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
from polar_mitm.wire import openai
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.frame import Choice

F, G = Tool("f", "", "{}"), Tool("g", "", "{}")


def test_an_overflow_is_worded_as_openai_does():
    """Harnesses compact by the code or by these words."""
    body = openai.body(ContextOverflow(5000, 4096))["error"]
    assert body["code"] == "context_length_exceeded"
    assert body["type"] == "invalid_request_error"
    assert "maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens" in body["message"]


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (BadRequest("n: 2"), "invalid_request_error", None),
        (Unauthorized("who"), "invalid_request_error", "invalid_api_key"),
        (Sealed("over"), "invalid_request_error", None),
        (NotFound("/x"), "invalid_request_error", None),
        (TooLarge("x"), "invalid_request_error", None),
        (EngineUnavailable("down"), "service_unavailable_error", "server_error"),
        (EngineError("odd"), "server_error", "server_error"),
    ],
)
def test_an_error_has_openais_shape(error: PolarError, kind: str, code: str | None):
    """Message, type, param and code."""
    assert openai.body(error) == {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


def test_a_used_budget_is_worded_as_an_account_at_its_limit():
    """A 400, which ends every harness at once; Qwen Code sends a 429 again for minutes."""
    error = BudgetUsed("session 's' has used its 2 turns")
    assert openai.status(error) == 400
    body = openai.body(error)["error"]
    assert (body["type"], body["code"]) == ("invalid_request_error", "billing_hard_limit_reached")
    assert body["message"] == "Billing hard limit has been reached"


@pytest.mark.parametrize("choice", [3, [], {"type": "function"}, {"type": "allowed_tools", "mode": "some"}])
def test_a_tool_choice_that_makes_no_sense_is_refused(choice):
    """Whatever JSON it is."""
    with pytest.raises(BadRequest, match="tool_choice"):
        openai.choose(Fields({"tool_choice": choice}), (F, G), lambda tool: tool.text("name"))


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, Choice((F, G))),
        ("auto", Choice((F, G))),
        ("none", Choice(())),
        ("required", Choice((F, G), "")),
        ({"type": "function", "name": "g"}, Choice((F, G), "g")),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}, Choice((G,))),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "g"}, {"name": "x"}]}, Choice((G,), "")),
    ],
)
def test_a_tool_choice_leaves_tools_and_forces_one(choice, wanted):
    """auto is the default."""
    assert openai.choose(Fields({"tool_choice": choice}), (F, G), lambda tool: tool.text("name")) == wanted


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, '{"type":"object"}'),
        ({"type": "json_schema", "schema": {"type": "object", "a": 1}}, '{"type":"object","a":1}'),
    ],
)
def test_a_format_gives_a_schema(wanted, schema):
    """JSON mode is the schema of any object."""
    assert openai.json_schema(Fields(wanted, "format"), Fields(wanted)) == schema


@pytest.mark.parametrize("wanted", [{"type": "json_schema"}, {"type": "grammar"}, {}])
def test_a_format_without_a_meaning_is_refused(wanted):
    """A schema format needs its schema; other formats are unknown."""
    with pytest.raises(BadRequest, match="format"):
        openai.json_schema(Fields(wanted, "format"), Fields(wanted))


def test_an_error_names_the_field_that_is_to_blame():
    """As `param`, with the stable code where there is one."""
    with pytest.raises(BadRequest) as caught:
        Fields({"n": "x"}).integer("n")
    assert openai.body(caught.value)["error"]["param"] == "n"
    error = openai.body(BadRequest("x", field="input", code="invalid_value"))["error"]
    assert (error["param"], error["code"]) == ("input", "invalid_value")


def test_models_have_openais_shape():
    """The SDK reads them; the context stands where OpenRouter has it."""
    listed = openai.models(["a", "b"], 4096)
    assert listed["object"] == "list"
    assert [Model.model_validate(model).id for model in listed["data"]] == ["a", "b"]
    assert listed["data"][0]["context_length"] == 4096


def test_counted_tokens_have_openais_shape():
    """The answer of `/responses/input_tokens`."""
    assert openai.counted(5) == {"object": "response.input_tokens", "input_tokens": 5}
