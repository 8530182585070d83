"""What OpenAI's two protocols share: tool choice, JSON formats, logprobs, models, errors.

Invariant: a context overflow always carries the code `context_length_exceeded`, by which harnesses compact or stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polar_mitm.conversation import Scored, Tool
from polar_mitm.errors import BadRequest, BudgetUsed, ContextOverflow, EngineUnavailable, PolarError, Unauthorized
from polar_mitm.wire.fields import Fields
from polar_mitm.wire.frame import Choice
from polar_mitm.wire.history import kind_of

ANY_OBJECT = '{"type":"object"}'
"""Schema of the JSON mode that gives none."""
NO_PARAMETERS = '{"type":"object","properties":{}}'
"""Schema of a function that is declared without parameters (Qwen Code 0.24.4: get_goal)."""
_HARD_LIMIT = "billing_hard_limit_reached"
"""An account that has spent what it may: a 400. A 429 with `insufficient_quota` says nearly the same, but Qwen Code
0.24.4 sends such a request again for minutes."""
_LEAST_LOGPROB = -9999.0
"""What OpenAI gives for a token that it thinks impossible; JSON has no infinity."""


# --- requests -----------------------------------------------------------------------------------------------------


def choose(request: Fields, tools: tuple[Tool, ...], named: Callable[[Fields], str | None]) -> Choice:
    """What `tool_choice` leaves of the tools. Raises BadRequest.

    `named` gives the name of the tool that an object of the protocol means, None for one that runs at the provider.
    """
    value = request.value("tool_choice")
    if value in (None, "auto"):
        return Choice(tools)
    if value == "none":
        return Choice(())
    if value == "required":
        return _required(request, tools)
    if isinstance(value, str):
        raise request.wrong("tool_choice", "expected 'none', 'auto', 'required' or an object")
    choice = request.wanted_child("tool_choice")
    if choice.text("type") == "allowed_tools":
        return _allowed(request, choice, tools, named)
    return Choice(tools, _offered(choice, tools, named(choice)))


def _allowed(request: Fields, choice: Fields, tools: tuple[Tool, ...], named: Callable[[Fields], str | None]) -> Choice:
    inside = choice.child("allowed_tools") or choice  # Chat nests what Responses does not
    names = {named(tool) for tool in inside.children("tools")}
    left = tuple(tool for tool in tools if tool.name in names)
    mode = inside.text("mode")
    if mode not in ("auto", "required"):
        raise inside.wrong("mode", "expected auto or required")
    return _required(request, left) if mode == "required" else Choice(left)


def _required(request: Fields, tools: tuple[Tool, ...]) -> Choice:
    if not tools:
        raise request.wrong("tool_choice", "a call is required but no tool is left that the model could call here")
    return Choice(tools, "")


def _offered(choice: Fields, tools: tuple[Tool, ...], name: str | None) -> str:
    if name is None:
        raise choice.wrong("type", "this tool runs at the provider and is not available here: use 'auto'")
    if name not in [tool.name for tool in tools]:
        raise BadRequest(f"Tool choice {name!r} not found in 'tools' parameter.", field="tool_choice")
    return name


def json_schema(wanted: Fields, holder: Fields | None) -> str | None:
    """The schema that a format asks for, which `holder` holds; None for plain text. Raises BadRequest."""
    kind = kind_of(wanted, ("text", "json_object", "json_schema"))
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "text":
        return None
    schema = holder.schema("schema") if holder else None
    if schema is None:
        raise BadRequest(f"{wanted.path}: json_schema without a schema; give the schema", field=wanted.path)
    return schema


# --- answers ------------------------------------------------------------------------------------------------------


def logprobs(scored: Sequence[Scored]) -> list[dict[str, Any]]:  # Any: JSON
    """Tokens with their logprobs; one that is no whole characters is spelled in bytes."""
    return [
        {
            "token": _spelled(token.text),
            "bytes": list(token.text),
            "logprob": max(token.logprob, _LEAST_LOGPROB),
            "top_logprobs": [],
        }
        for token in scored
    ]


def _spelled(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def counted(tokens: int) -> dict[str, Any]:  # Any: JSON
    """The answer of `/responses/input_tokens`."""
    return {"object": "response.input_tokens", "input_tokens": tokens}


def model(name: str, context: int) -> dict[str, Any]:  # Any: JSON
    """One model; its context under the name that OpenRouter gives it, since OpenAI gives none."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "polar", "context_length": context}


def models(names: Sequence[str], context: int) -> dict[str, Any]:  # Any: JSON
    """The list of models."""
    return {"object": "list", "data": [model(name, context) for name in names]}


def body(error: PolarError) -> dict[str, Any]:  # Any: JSON
    """The body of a plain error."""
    field = error.field if isinstance(error, BadRequest) else None
    return {"error": {"message": message(error), "type": _type(error), "param": field, "code": code(error)}}


def status(error: PolarError) -> int:
    """The HTTP status of a plain error; 400 for a session without budget, as for an account at its limit."""
    return 400 if isinstance(error, BudgetUsed) else error.status


def message(error: PolarError) -> str:
    """The error's text; an overflow and a used budget in OpenAI's words."""
    if isinstance(error, ContextOverflow):
        return (
            f"This model's maximum context length is {error.limit} tokens. However, your messages resulted in "
            f"{error.prompt_tokens} tokens. Please reduce the length of the messages."
        )
    return "Billing hard limit has been reached" if isinstance(error, BudgetUsed) else str(error)


def code(error: PolarError) -> str | None:
    """OpenAI's stable name of the error; None where it gives none."""
    if isinstance(error, ContextOverflow):
        return "context_length_exceeded"
    if isinstance(error, BadRequest):
        return error.code
    if isinstance(error, Unauthorized):
        return "invalid_api_key"
    if isinstance(error, BudgetUsed):
        return _HARD_LIMIT
    return "server_error" if error.status >= 500 else None


def _type(error: PolarError) -> str:
    if isinstance(error, EngineUnavailable):
        return "service_unavailable_error"
    return "server_error" if error.status >= 500 else "invalid_request_error"
