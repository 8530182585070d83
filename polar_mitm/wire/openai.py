"""What OpenAI's two protocols share: errors, tool choice, JSON formats.

Invariant: a context overflow always carries the code `context_length_exceeded`, by which harnesses compact or stop.
"""

from __future__ import annotations

from typing import Any

from polar_mitm.errors import BadRequest, ContextOverflow, EngineUnavailable, PolarError, Unauthorized
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.history import kind_of

ANY_OBJECT = '{"type":"object"}'
"""Schema of the JSON mode that gives none."""
NO_PARAMETERS = '{"type":"object","properties":{}}'
"""Schema of a function that is declared without parameters (Qwen Code 0.24.4: get_goal)."""


def no_tools(request: Fields) -> bool:
    """Whether `tool_choice` takes the tools away. Raises BadRequest when it forces a call."""
    choice = request.value("tool_choice")
    if choice not in (None, "none", "auto"):
        raise request.wrong("tool_choice", "not supported: only 'auto' and 'none' are, a call cannot be forced")
    return choice == "none"


def json_schema(wanted: Fields, holder: Fields | None) -> str | None:
    """The schema that a format asks for, which `holder` holds; None for plain text. Raises BadRequest."""
    kind = kind_of(wanted, {"text": "", "json_object": "", "json_schema": ""})
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "text":
        return None
    schema = holder.schema("schema") if holder else None
    if schema is None:
        raise BadRequest(f"{wanted.path}: json_schema without a schema; give the schema")
    return schema


def body(error: PolarError) -> dict[str, Any]:  # Any: JSON
    """The body of a plain error."""
    return {"error": {"message": message(error), "type": _type(error), "param": None, "code": code(error)}}


def message(error: PolarError) -> str:
    """The error's text; an overflow in OpenAI's words."""
    if isinstance(error, ContextOverflow):
        return (
            f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
            f"{error.prompt_tokens} tokens. Please reduce the length of the messages."
        )
    return str(error)


def code(error: PolarError) -> str | None:
    """OpenAI's stable name of the error; None where it gives none."""
    if isinstance(error, ContextOverflow):
        return "context_length_exceeded"
    if isinstance(error, Unauthorized):
        return "invalid_api_key"
    return "server_error" if error.status >= 500 else None


def _type(error: PolarError) -> str:
    if isinstance(error, EngineUnavailable):
        return "service_unavailable_error"
    return "server_error" if error.status >= 500 else "invalid_request_error"
