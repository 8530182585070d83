"""A request of Gemini's to a Conversation: contents, tools, tool configuration and generation configuration.

Invariant: the ids and thought signatures found are echoed in the order of the history, and every functionResponse is
matched to its functionCall, by id or, where a harness drops ids (Pi 1.6.0), by name and order. Both spellings of a
field are read, camelCase and snake_case. What runs at Google (search, code execution) is left out and listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from polar_mitm.conversation import (
    Conversation,
    Message,
    Part,
    Reasoning,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from polar_mitm.errors import BadRequest
from polar_mitm.wire import frame
from polar_mitm.wire.dialect import Support
from polar_mitm.wire.fields import Fields, compact
from polar_mitm.wire.frame import Choice
from polar_mitm.wire.gemini_schema import camel, json_schema
from polar_mitm.wire.history import History
from polar_mitm.wire.openai import ANY_OBJECT, NO_PARAMETERS

RAW_ARGUMENTS = "_arguments"
"""Name of the one argument of a call whose sampled arguments are no JSON object, which `args` must be."""
_OPAQUE = {"args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema", "labels"}
_DEPTH = 8
"""How deep objects and arrays nest from the request to a field that is read."""
_DATA = ("text", "functionCall", "functionResponse", "executableCode", "codeExecutionResult")
_MAX_CHOICES = 8


def read(body: Mapping[str, Any], support: Support) -> Conversation:  # Any: JSON
    """The canonical request. Raises BadRequest."""
    given = _given(body)
    model = Fields(given).text("model").removeprefix("models/")
    _refuse_media(Fields(given), model)
    request, history = frame.opened(given, support, lambda part, remedy: part.wrong("type", remedy))
    _read_system(request, history)
    contents = _Contents(history)
    for content in _several(request, "contents"):
        contents.read(content)
    if history.messages("contents")[-1].role in ("assistant", "system"):
        words = "Please ensure that multiturn requests end with a user role or a function response"
        raise BadRequest(f"contents: {words}", field="contents")
    choice = _choose(request, _tools(request, history), history)
    config = request.child("generationConfig") or Fields({}, "generationConfig")
    sampling, thinking = _sampling(config), config.child("thinkingConfig")
    history.ignore(*(config.at(name) for name in config.unread()))
    array = request.maybe_text("alt") != "sse" and request.flag("stream")
    return replace(
        frame.conversation(request, history, messages="contents", choice=choice, sampling=sampling, thread=None),
        model=model,
        framing="array" if array else "sse",
        shows_reasoning=thinking.flag("includeThoughts") if thinking else False,
    )


def _given(body: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: JSON
    """The request itself; `countTokens` may wrap it, and what the route read from the path stands outside."""
    given = cast("Mapping[str, Any]", _camel(body, _DEPTH))  # Any: JSON
    outer = Fields(given)
    if outer.child("generateContentRequest") is None:
        return given
    outside = {name: value for name, value in given.items() if name != "generateContentRequest"}
    return {**given["generateContentRequest"], **outside}


def _refuse_media(request: Fields, model: str) -> None:
    for name in ("inlineData", "fileData"):
        for part, _ in request.found(f"contents.parts.{name}"):
            medium = (part.wanted_child(name).maybe_text("mimeType") or "").partition("/")[0].capitalize()
            medium = medium if medium in ("Image", "Audio", "Video") else "Document"
            words = f"{medium} input modality is not enabled for models/{model}"
            raise BadRequest(f"{part.at(name)}: {words}; send text only", field=part.at(name))


def _camel(value: object, depth: int) -> object:
    """Field names in camelCase, as deep as fields are read; names that are the user's own stay."""
    if isinstance(value, list) and depth:
        return [_camel(item, depth - 1) for item in cast("list[Any]", value)]
    if not isinstance(value, Mapping) or not depth:
        return value
    named = ((camel(name), inner) for name, inner in cast("Mapping[str, Any]", value).items())
    return {name: inner if name in _OPAQUE else _camel(inner, depth - 1) for name, inner in named}


def _several(owner: Fields, name: str) -> list[Fields]:
    """An array of objects, for which Google also takes a single one."""
    one = owner.child(name) if isinstance(owner.value(name), Mapping) else None
    return owner.children(name) if one is None else [one]


# --- contents -----------------------------------------------------------------------------------------------------


def _read_system(request: Fields, history: History) -> None:
    name = "systemInstruction"
    if isinstance(request.value(name), str):
        parts: tuple[Part, ...] = (Text(request.text(name)),)
    else:
        whole = _several(request, name)
        inside = [_several(one, "parts") if one.value("parts") is not None else [one] for one in whole]
        parts = tuple(Text(_text(part, history)) for group in inside for part in group)
    if parts:
        history.add(Message("system", parts))


def _text(part: Fields, history: History) -> str:
    kind = _kind(part, history)
    if kind != "text":
        raise part.wrong(kind, "only text is supported here")
    return part.text("text")


def _kind(part: Fields, history: History) -> str:
    """Which of its fields holds the part's data. Raises BadRequest for a part with none that is known."""
    kind = next((name for name in _DATA if part.value(name) is not None), None)
    if kind is None and part.value("thoughtSignature") is None:
        raise BadRequest(f"{part.path}: unknown part, expected one of {', '.join(_DATA)}; got {part.unread()}")
    history.ignore(*(f"contents.parts.{name}" for name in part.unread() if name not in ("thought", "thoughtSignature")))
    return kind or "thoughtSignature"


class _Contents:
    """Reads contents in their order into a history; knows which calls still wait for their result."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._waiting: list[ToolCall] = []
        self._calls = 0

    def read(self, content: Fields) -> None:
        """The next content."""
        role, parts = content.maybe_text("role") or "user", _several(content, "parts")
        if role == "model":
            said = (self._said(part) for part in parts)
            self._history.add(Message("assistant", tuple(part for part in said if part is not None)))
        elif role in ("user", "function"):
            self._read_user(content, parts)
        else:
            raise content.wrong("role", "Please use a valid role: user, model")

    def _read_user(self, content: Fields, parts: list[Fields]) -> None:
        """Results first, as the answers to the calls before; then what the user says."""
        results: list[Part] = []
        texts: list[Part] = []
        for part in parts:
            if _kind(part, self._history) == "functionResponse":
                result = self._result(part.wanted_child("functionResponse"))
                if result not in results:  # Gemini CLI 0.61.0 sends each result twice after --resume
                    results.append(result)
            else:
                texts.append(Text(_text(part, self._history)))
        if results:
            self._history.add(Message("tool", tuple(results)))
        if texts:
            self._history.add(Message("user", tuple(texts)))
        if not parts:
            raise content.wrong("parts", "must not be empty: a content needs at least one part")

    def _said(self, part: Fields) -> Part | None:
        kind = _kind(part, self._history)
        said: Part | None = None
        if kind == "text" and (text := part.text("text")):
            said = Reasoning(text) if part.flag("thought") else Text(text)
        elif kind == "functionCall":
            said = self._call(part.wanted_child("functionCall"))
        elif kind == "executableCode":
            code = part.wanted_child(kind)
            said = Text(f"```{(code.maybe_text('language') or '').lower()}\n{code.maybe_text('code') or ''}\n```\n")
        elif kind == "codeExecutionResult":
            said = Text(f"```\n{part.wanted_child(kind).maybe_text('output') or ''}\n```\n")
        elif kind == "functionResponse":
            raise part.wrong(kind, "belongs into a content of role 'user'")
        self._history.echo(part.maybe_text("thoughtSignature"))
        return said

    def _call(self, call: Fields) -> ToolCall:
        name, given = call.text("name"), call.maybe_text("id")
        self._history.echo(given)
        self._calls += 1
        found = ToolCall(_bare(given, name) or f"call_{self._calls}", name, _arguments(call.value("args")))
        self._waiting.append(found)
        return found

    def _result(self, result: Fields) -> ToolResult:
        name, given = result.text("name"), result.maybe_text("id")
        self._history.echo(given)
        wanted = _bare(given, name)
        call = next((c for c in self._waiting if c.id == wanted or (wanted is None and c.name == name)), None)
        if call is not None:
            self._waiting.remove(call)
        text, failed = _output(result.value("response"))
        return ToolResult(call.id if call else wanted or name, text, failed)


def _bare(given: str | None, name: str) -> str | None:
    """An id as we minted it: Gemini CLI 0.61.0 puts the tool's name before it in router calls and summaries."""
    return given.removeprefix(f"{name}__") if given else None


def _arguments(args: object) -> str:
    if isinstance(args, Mapping) and set(cast("Mapping[str, Any]", args)) == {RAW_ARGUMENTS}:
        raw = cast("Mapping[str, Any]", args)[RAW_ARGUMENTS]
        return raw if isinstance(raw, str) else compact(args)
    return compact({} if args is None else args)


def _output(response: object) -> tuple[str, bool]:
    """What a tool said, and whether that is an error: `output` and `error` are Google's names, `result` its SDK's."""
    if not isinstance(response, Mapping):
        return ("" if response is None else response if isinstance(response, str) else compact(response)), False
    fields = cast("Mapping[str, Any]", response)  # Any: a tool's JSON
    failed = set(fields) == {"error"}
    if len(fields) == 1:
        ((name, value),) = fields.items()
        if name in ("output", "error", "result") and isinstance(value, str):
            return value, failed
    return compact(response), failed


# --- tools --------------------------------------------------------------------------------------------------------


def _tools(request: Fields, history: History) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    for group in _several(request, "tools"):
        for declared in _several(group, "functionDeclarations"):
            schema = json_schema(declared, "parametersJsonSchema") or json_schema(declared, "parameters")
            description = declared.maybe_text("description") or ""
            tools.append(Tool(declared.text("name"), description, schema or NO_PARAMETERS))
            history.ignore(*(f"tools.functionDeclarations.{name}" for name in declared.unread()))
        history.ignore(*(f"tools.{name}" for name in group.unread()))  # runs at Google
    return tuple(tools)


def _choose(request: Fields, tools: tuple[Tool, ...], history: History) -> Choice:
    """What `toolConfig` leaves of the tools. Raises BadRequest."""
    whole = request.child("toolConfig")
    config = whole.child("functionCallingConfig") if whole else None
    if config is None:
        return Choice(tools)
    mode = config.maybe_text("mode") or "MODE_UNSPECIFIED"
    allowed = _allowed(config, mode, tools)
    history.ignore(*(config.at(name) for name in config.unread()))
    if mode == "NONE":
        return Choice(())
    if mode != "ANY":
        return Choice(allowed)
    if not allowed:
        raise config.wrong("mode", "Function calling config is set without function_declarations")
    return Choice(tools, allowed[0].name) if len(allowed) == 1 else Choice(allowed, "")


def _allowed(config: Fields, mode: str, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    if mode not in ("AUTO", "NONE", "ANY", "VALIDATED", "MODE_UNSPECIFIED"):
        raise config.wrong("mode", "expected AUTO, ANY, NONE or VALIDATED")
    names = config.texts("allowedFunctionNames")
    if names and mode not in ("ANY", "VALIDATED"):
        raise config.wrong("allowedFunctionNames", "only modes ANY and VALIDATED can restrict the functions")
    if set(names) - {tool.name for tool in tools}:
        raise config.wrong("allowedFunctionNames", "every name must be among the function_declarations")
    return tuple(tool for tool in tools if tool.name in names) if names else tools


# --- generation ---------------------------------------------------------------------------------------------------


def _sampling(config: Fields) -> Sampling:
    if set(config.texts("responseModalities")) - {"TEXT", "MODALITY_UNSPECIFIED"}:
        raise config.wrong("responseModalities", "only text can be generated: ask for TEXT")
    choices = config.integer("candidateCount", least=1) or 1
    top_k = config.number("topK")  # google-genai 3.6.1 sends 4.0
    if choices > _MAX_CHOICES:
        raise config.wrong("candidateCount", f"must be from 1 to {_MAX_CHOICES}")
    return Sampling(
        temperature=config.number("temperature"),
        top_p=config.number("topP"),
        top_k=None if top_k is None else int(top_k),
        max_tokens=config.integer("maxOutputTokens", least=1),
        seed=config.integer("seed"),
        json_schema=_format(config),
        stop=config.texts("stopSequences"),
        choices=choices,
        logprobs=config.flag("responseLogprobs"),
    )


def _format(config: Fields) -> str | None:
    """The schema that the answer must satisfy; Gemini CLI 0.61.0 writes even `responseJsonSchema` in Google's types."""
    media = config.maybe_text("responseMimeType") or "text/plain"
    schema = json_schema(config, "responseJsonSchema") or json_schema(config, "responseSchema")
    if media == "application/json":
        return schema or ANY_OBJECT
    if media != "text/plain":
        raise config.wrong("responseMimeType", "only text/plain and application/json are supported")
    if schema:
        raise config.wrong("responseMimeType", "a response schema needs 'application/json'")
    return None
