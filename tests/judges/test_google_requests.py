"""Whatever Google's SDK makes of its users' Python objects is understood, streamed or not."""

import json

from google.genai import types

from polar_mitm.conversation import Conversation, Message, Sampling, Text, ToolResult
from polar_mitm.routes import find
from tests.judges.clients import GEMINI, PROVIDER, google_client
from tests.mitm.wire.replies import CORE


def _asked(contents, *, stream: bool = False, **config) -> Conversation:
    """The request that the SDK sends, decoded."""
    models = google_client().models
    given = {"model": "m", "contents": contents, "config": types.GenerateContentConfig(**config)}
    PROVIDER.give(b'{"candidates":[]}')
    _ = list(models.generate_content_stream(**given)) if stream else models.generate_content(**given)
    asked = PROVIDER.asked
    match = find(asked.method, asked.url.host, asked.url.path, asked.url.query.decode(), dict(asked.headers))
    assert match.dialect is GEMINI
    return GEMINI.decode({**json.loads(asked.content), **match.fields}, dict(asked.headers))


def run(command: str, times: int = 1) -> str:
    """Runs a command."""
    return command * times


def test_a_streamed_request_is_framed_as_events():
    """The SDK always asks for `alt=sse`."""
    conversation = _asked("hi", stream=True)
    assert (conversation.model, conversation.stream, conversation.framing) == ("m", True, "sse")
    assert not _asked("hi").stream


def test_python_functions_and_declarations_are_tools():
    """The SDK writes Google's types for a function's signature."""
    declared = types.FunctionDeclaration(name="f", description="d", parameters_json_schema={"type": "object"})
    off = types.AutomaticFunctionCallingConfig(disable=True)
    tools = [run, types.Tool(function_declarations=[declared]), types.Tool(google_search=types.GoogleSearch())]
    conversation = _asked("hi", tools=tools, automatic_function_calling=off)
    first, second = sorted(conversation.tools, key=lambda tool: tool.name, reverse=True)
    assert (first.name, second.name) == ("run", "f")
    assert json.loads(first.parameters)["properties"]["command"]["type"] == "string"
    assert "tools.googleSearch" in conversation.fidelity


def test_a_forced_function_is_the_forced_tool():
    """By the calling mode ANY."""
    calling = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["run"])
    off = types.AutomaticFunctionCallingConfig(disable=True)
    config = types.ToolConfig(function_calling_config=calling)
    assert _asked("hi", tools=[run], tool_config=config, automatic_function_calling=off).forced_tool == "run"


def test_a_pydantic_model_is_a_json_schema():
    """What may be None may be null."""
    wanted = {"type": "OBJECT", "properties": {"n": {"type": "INTEGER", "nullable": True}}, "required": ["n"]}
    conversation = _asked("hi", response_mime_type="application/json", response_schema=wanted)
    schema = json.loads(conversation.sampling.json_schema)
    assert schema["properties"] == {"n": {"type": ["integer", "null"]}}


def test_the_configuration_is_the_sampling():
    """With stops, choices and logprobs; thinking says whether it is shown."""
    conversation = _asked(
        "hi",
        system_instruction="be good",
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        max_output_tokens=9,
        stop_sequences=["x"],
        candidate_count=2,
        seed=7,
        response_logprobs=True,
        thinking_config=types.ThinkingConfig(include_thoughts=True),
    )
    assert conversation.sampling == Sampling(0.5, 0.9, 4, 9, 7, None, ("x",), 2, logprobs=True)
    assert conversation.messages[0] == Message("system", (Text("be good"),))
    assert conversation.shows_reasoning


def test_a_signature_of_bytes_comes_back_as_it_was_sent():
    """The SDK decodes it and encodes it again, in the alphabet of URLs."""
    signature = f"{CORE}AA"
    call = types.Part(function_call=types.FunctionCall(name="run", args={"command": "ls"}), thought_signature=signature)
    response = types.Part.from_function_response(name="run", response={"result": "a.txt"})
    conversation = _asked([types.UserContent("hi"), types.ModelContent([call]), types.UserContent([response])])
    assert conversation.echoes == (signature,)
    assert conversation.messages[2].parts == (ToolResult(conversation.messages[1].parts[0].id, "a.txt"),)
