"""What OpenAI's two protocols share."""

import pytest

from polar_mitm.errors import (
    BadRequest,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    NotFound,
    PolarError,
    Unauthorized,
)
from polar_mitm.wire import openai
from polar_mitm.wire.fields import Fields


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
        (NotFound("/x"), "invalid_request_error", None),
        (EngineUnavailable("down"), "service_unavailable_error", "server_error"),
        (EngineError("odd"), "server_error", "server_error"),
    ],
)
def test_an_error_has_openais_shape(error: PolarError, kind: str, code: str | None):
    """Message, type, param and code."""
    assert openai.body(error) == {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "run"}, 3, {"type": "allowed_tools"}])
def test_a_forced_tool_call_is_refused(choice):
    """Forcing would change the distribution that is sampled from."""
    with pytest.raises(BadRequest, match="tool_choice: not supported"):
        openai.no_tools(Fields({"tool_choice": choice}))


@pytest.mark.parametrize(("choice", "none"), [(None, False), ("auto", False), ("none", True)])
def test_tool_choice_none_takes_the_tools_away(choice, none):
    """auto is the default."""
    assert openai.no_tools(Fields({"tool_choice": choice})) is none


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
