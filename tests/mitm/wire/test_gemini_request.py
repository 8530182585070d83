"""Gemini's requests as its harnesses send them: contents, tools, configuration, and what is refused."""

import json

import pytest

from polar_mitm.conversation import Message, Reasoning, Sampling, Text, Tool, ToolResult
from polar_mitm.errors import BadRequest
from polar_mitm.wire.gemini import Gemini
from tests.mitm.wire.replies import CORE, golden

GEMINI = Gemini()
HI = {"role": "user", "parts": [{"text": "hi"}]}
CALL = {"functionCall": {"name": "run", "args": {"b": 1, "a": [2]}}}
FUNCTIONS = {"functionDeclarations": [{"name": name} for name in ("a", "b", "c")]}


def _decode(**body):
    return GEMINI.decode({"model": "m", "contents": [HI], **body}, {})


def _config(**config):
    return _decode(generationConfig=config)


def _turn(*parts):
    """The contents of a model's turn between two of the user."""
    return [HI, {"role": "model", "parts": list(parts)}, HI]


def _answered(*results):
    """The contents of two calls of one tool and these results."""
    return [HI, {"role": "model", "parts": [CALL, CALL]}, {"role": "user", "parts": list(results)}]


def _result(**fields):
    return {"functionResponse": {"name": "run", **fields}}


# --- real harnesses


def test_a_gemini_cli_turn_is_canonical():
    """System, user, text and call in one message, the result matched by id; no thoughts, which it drops."""
    request = golden("gemini-cli-0.61.0.tool-turn")
    conversation = GEMINI.decode(request["body"] | {"model": "gemini-3.8-flash", "stream": True, "alt": "sse"}, {})
    assert [message.role for message in conversation.messages] == ["system", "user", "assistant", "tool"]
    text, call = conversation.messages[2].parts
    assert text == Text("I will write it.")
    assert list(json.loads(call.arguments)) == ["command"]
    assert conversation.messages[3].parts[0].call_id == call.id
    signature = call.id[:-2] + "AA"  # on the text and on the call
    assert conversation.echoes == (signature, call.id, signature, call.id)
    assert (conversation.stream, conversation.framing, conversation.shows_reasoning) == (True, "sse", True)


def test_a_gemini_cli_router_call_wants_json():
    """Not streamed, no tools, and a schema whose types Google writes in upper case."""
    request = golden("gemini-cli-0.61.0.router")
    conversation = GEMINI.decode(request["body"] | {"model": "gemini-3.5-flash-lite", "stream": False}, {})
    schema = json.loads(conversation.sampling.json_schema)
    assert (schema["type"], schema["properties"]["complexity_score"]["type"]) == ("object", "integer")
    assert (conversation.tools, conversation.stream) == ((), False)


def test_a_pi_turn_is_canonical():
    """The thought comes back, the call's id does not: the result is matched by name, the signature is the pointer."""
    request = golden("pi-1.6.0.gemini-tool-turn")
    conversation = GEMINI.decode(request["body"] | {"model": "gemini-2.5-pro", "stream": True, "alt": "sse"}, {})
    reasoning, text, call = conversation.messages[2].parts
    assert isinstance(reasoning, Reasoning)
    assert text == Text("I will write it.")
    assert conversation.messages[3].parts == (ToolResult(call.id, "wrote 0: bonjour, café"),)
    signature = conversation.echoes[0]
    assert signature.endswith("AA")
    assert conversation.echoes == (signature, signature)


def test_a_router_call_of_gemini_cli_puts_the_tool_before_the_id():
    """The core is found in it, and call and result still belong together."""
    called = {"functionCall": {"id": f"run__{CORE}00", "name": "run", "args": {}}}
    answered = {"role": "user", "parts": [_result(id=f"run__{CORE}00", response={"output": "x"})]}
    conversation = _decode(contents=[HI, {"role": "model", "parts": [called]}, answered])
    assert conversation.messages[1].parts[0].id == conversation.messages[2].parts[0].call_id == f"{CORE}00"
    assert conversation.echoes == (f"run__{CORE}00", f"run__{CORE}00")


# --- contents


def test_system_instructions_may_be_a_string_a_content_or_parts():
    """Google's SDKs accept all of them."""
    whole = {"parts": [{"text": "a"}, {"text": "b"}]}
    for given_, texts in (("a", "a"), (whole, "ab"), (whole["parts"], "ab"), ({"parts": {"text": "a"}}, "a")):
        system = _decode(systemInstruction=given_).messages[0]
        assert system == Message("system", tuple(Text(text) for text in texts))


def test_a_content_without_a_role_is_the_users():
    """As in Google's own examples, which also give single objects for arrays."""
    assert _decode(contents={"parts": {"text": "hi"}}).messages == (Message("user", (Text("hi"),)),)


def test_both_spellings_of_a_field_are_read():
    """Google takes snake_case; names inside arguments, responses and schemas are the user's own."""
    camel = _decode(
        systemInstruction="s",
        generationConfig={"maxOutputTokens": 5, "stopSequences": ["x"], "topK": 3},
        contents=_turn({"functionCall": {"name": "run", "args": {"a_b": 1}}, "thoughtSignature": "sig="}),
        tools=[{"functionDeclarations": [{"name": "run", "parametersJsonSchema": {"properties": {"a_b": {}}}}]}],
    )
    snake = _decode(
        system_instruction="s",
        generation_config={"max_output_tokens": 5, "stop_sequences": ["x"], "top_k": 3},
        contents=_turn({"function_call": {"name": "run", "args": {"a_b": 1}}, "thought_signature": "sig="}),
        tools=[{"function_declarations": [{"name": "run", "parameters_json_schema": {"properties": {"a_b": {}}}}]}],
    )
    assert snake == camel
    assert '"a_b"' in camel.tools[0].parameters
    assert camel.messages[2].parts[0].arguments == '{"a_b":1}'


def test_results_without_ids_belong_to_the_calls_of_their_name_in_order():
    """Pi drops ids; two calls of one tool get their own results."""
    conversation = _decode(contents=_answered(_result(response={"output": "1"}), _result(response={"output": "2"})))
    first, second = conversation.messages[1].parts
    assert first.id != second.id
    assert conversation.messages[2].parts == (ToolResult(first.id, "1"), ToolResult(second.id, "2"))


@pytest.mark.parametrize(
    ("response", "text", "failed"),
    [
        ({"output": "x"}, "x", False),
        ({"result": "x"}, "x", False),
        ({"error": "x"}, "x", True),
        ({"error": {"code": 1}}, '{"error":{"code":1}}', True),
        ({"output": "x", "error": "y"}, '{"output":"x","error":"y"}', False),
        ({"output": ["é", None]}, '{"output":["é",null]}', False),
        ([1], "[1]", False),
        (None, "", False),
    ],
)
def test_a_function_response_may_be_any_json(response, text, failed):
    """A lone text under Google's names is that text, everything else the JSON as it came."""
    result = _decode(contents=_answered(_result(response=response))).messages[2].parts[0]
    assert (result.text, result.is_error) == (text, failed)


def test_a_result_sent_twice_is_one_result():
    """Gemini CLI doubles each after --resume; two calls with equal results keep theirs."""
    called = {"role": "model", "parts": [{"functionCall": {"id": name, "name": "run"}} for name in ("a", "b")]}
    twice = [_result(id=name, response={"output": "x"}) for name in ("a", "a", "b", "b")]
    messages = _decode(contents=[HI, called, {"role": "user", "parts": twice}]).messages
    assert messages[2].parts == (ToolResult("a", "x"), ToolResult("b", "x"))


def test_results_and_text_of_one_content_are_two_messages():
    """A tool message with the results, then what the user says."""
    said = _decode(contents=_answered({"text": "go on"}, _result(response={"output": "1"}))).messages[2:]
    assert [message.role for message in said] == ["tool", "user"]


def test_a_signature_on_any_part_is_an_echo():
    """Also on an empty text part, which says nothing, and on a part with nothing else."""
    parts = [{"text": "t", "thought": True, "thoughtSignature": "s1"}, {"text": "", "thoughtSignature": "s2"}]
    conversation = _decode(contents=_turn(*parts, {"thoughtSignature": "s3"}))
    assert conversation.messages[1] == Message("assistant", (Reasoning("t"),))
    assert conversation.echoes == ("s1", "s2", "s3")


def test_code_that_ran_at_google_is_text():
    """A history that another model began goes on."""
    parts = [{"executableCode": {"language": "PYTHON", "code": "1"}}, {"codeExecutionResult": {"output": "2"}}]
    texts = _decode(contents=_turn(*parts)).messages[1].parts
    assert texts == (Text("```python\n1\n```\n"), Text("```\n2\n```\n"))


@pytest.mark.parametrize(
    ("name", "mime", "words"),
    [
        ("inlineData", "image/png", "Image input modality is not enabled for models/m"),
        ("inline_data", "audio/wav", "Audio input modality"),
        ("fileData", "application/pdf", "Document input modality"),
    ],
)
def test_media_are_refused_in_googles_words(name, mime, words):
    """The error names the part."""
    part = {name: {"mimeType": mime, "data": "AA=="}}
    with pytest.raises(BadRequest, match=rf"contents\[0\]\.parts\[0\]\.\w+: {words}"):
        _decode(contents=[{"parts": [part]}])


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("cachedContent", {"cachedContent": "cachedContents/1"}),
        ("contents", {"contents": []}),
        ("contents", {"contents": [HI, {"role": "model", "parts": [{"text": "I"}]}]}),
        ("role", {"contents": [{"role": "system", "parts": [{"text": "x"}]}]}),
        ("parts", {"contents": [{"role": "user", "parts": []}]}),
        (r"parts\[0\]", {"contents": [{"role": "user", "parts": [{"toolCall": {}}]}]}),
        ("functionResponse.parts", {"contents": _answered(_result(parts=[{"inlineData": {}}]))}),
        ("functionResponse", {"contents": _turn(_result(response={}))}),
        ("functionCall", {"contents": [{"role": "user", "parts": [CALL]}]}),
        ("systemInstruction", {"systemInstruction": {"parts": [CALL]}}),
        ("parameters", {"tools": [{"functionDeclarations": [{"name": "f", "parameters": "x"}]}]}),
        ("generationConfig.logprobs", {"generationConfig": {"responseLogprobs": True, "logprobs": 5}}),
        ("candidateCount", {"generationConfig": {"candidateCount": 9}}),
        ("candidateCount", {"generationConfig": {"candidateCount": 0}}),
        ("responseMimeType", {"generationConfig": {"responseMimeType": "text/x.enum"}}),
        ("responseMimeType", {"generationConfig": {"responseSchema": {"type": "OBJECT"}}}),
        ("responseModalities", {"generationConfig": {"responseModalities": ["AUDIO"]}}),
        ("responseFormat", {"generationConfig": {"responseFormat": [{"text": {}}]}}),
        ("mode", {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}),
        ("mode", {"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}),
        ("allowedFunctionNames", {"toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["a"]}}}),
    ],
)
def test_what_would_change_the_meaning_is_refused(field, body):
    """The error names the field."""
    with pytest.raises(BadRequest, match=field):
        _decode(**body)


def test_tokens_are_counted_of_contents_or_of_a_whole_request():
    """`countTokens` wraps a request; the model of the path wins."""
    wrapped = {"generateContentRequest": {"model": "models/other", "contents": [HI], "systemInstruction": "s"}}
    assert GEMINI.decode({**wrapped, "model": "m"}, {}) == _decode(systemInstruction="s")


# --- tools and sampling


def test_tools_keep_their_order_and_what_runs_at_google_is_listed():
    """Several groups, both kinds of schema, and none at all."""
    conversation = _decode(
        tools=[
            {"functionDeclarations": [{"name": "a", "description": "d", "parametersJsonSchema": {"b": 1}}]},
            {
                "googleSearch": {},
                "functionDeclarations": [{"name": "b", "parameters": {"type": "OBJECT"}}, {"name": "c"}],
            },
            {"somethingNew": {}},
        ],
        safetySettings=[{"category": "x"}],
    )
    assert conversation.tools == (
        Tool("a", "d", '{"b":1}'),
        Tool("b", "", '{"type":"object"}'),
        Tool("c", "", '{"type":"object","properties":{}}'),
    )
    assert set(conversation.fidelity) == {"tools.googleSearch", "tools.somethingNew", "safetySettings"}


@pytest.mark.parametrize(
    ("config", "offered", "forced"),
    [
        ({}, "abc", None),
        ({"mode": "AUTO"}, "abc", None),
        ({"mode": "NONE"}, "", None),
        ({"mode": "ANY"}, "abc", ""),
        ({"mode": "ANY", "allowedFunctionNames": ["b"]}, "abc", "b"),
        ({"mode": "ANY", "allowedFunctionNames": ["c", "a"]}, "ac", ""),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["b"]}, "b", None),
    ],
)
def test_each_calling_mode_leaves_its_tools(config, offered, forced):
    """ANY forces a call, of the one allowed function when there is only one."""
    conversation = _decode(tools=[FUNCTIONS], toolConfig={"functionCallingConfig": config})
    assert "".join(tool.name for tool in conversation.tools) == offered
    assert conversation.forced_tool == forced


def test_the_generation_configuration_is_read():
    """What is honoured or recorded has its place; the rest is listed."""
    conversation = _config(
        temperature=0.5,
        topP=0.9,
        topK=4,
        maxOutputTokens=9,
        seed=7,
        stopSequences=["x", "y"],
        candidateCount=2,
        responseLogprobs=True,
        responseMimeType="application/json",
        presencePenalty=0.1,
        thinkingConfig={"thinkingBudget": 5},
    )
    assert conversation.sampling == Sampling(0.5, 0.9, 4, 9, 7, '{"type":"object"}', ("x", "y"), 2, logprobs=True)
    assert "generationConfig.presencePenalty" in conversation.fidelity
    assert "generationConfig.thinkingConfig.thinkingBudget" in conversation.fidelity
