"""The tables of what becomes of each field are true: every entry is tried."""

import pytest

from polar_mitm.conversation import Message, Sampling
from polar_mitm.errors import BadRequest
from polar_mitm.wire.anthropic import AnthropicMessages
from polar_mitm.wire.openai_chat import OpenAIChat
from polar_mitm.wire.openai_responses import OpenAIResponses

CHAT, RESPONSES, ANTHROPIC = OpenAIChat(), OpenAIResponses(), AnthropicMessages()
BASES = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "m", "input": "hi"},
    ANTHROPIC: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}
FUNCTION = {"name": "f", "parameters": {}}
BOUND = {"name": "f", "input_schema": {}}
IMAGE = {"type": "image", "source": {"type": "base64"}}


def _says(**message):
    return {"messages": [{"role": "user", "content": "hi", **message}, {"role": "user", "content": "go on"}]}


def _block(**block):
    return _says(content=[block])


def _inner(**block):
    return _block(type="tool_result", tool_use_id="t", content=[block])


def _document(kind):
    return {"type": "document", "source": {"type": kind}}


def _item(kind, **fields):
    return {"input": [{"type": kind, **fields}, {"role": "user", "content": "hi"}]}


def _heard(kind):
    return {"input": [{"role": "user", "content": [{"type": kind}]}]}


def _printed(kind):
    return {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": kind}]}]}


EXAMPLES = {
    CHAT: {
        "stream_options.include_obfuscation": {"stream_options": {"include_obfuscation": False}},
        "messages.content.cache_control": _block(type="text", text="a", cache_control={"type": "ephemeral"}),
        "messages.name": _says(name="n"),
        "messages.audio": _says(role="assistant", audio={"id": "a"}),
        "messages.function_call": _says(role="assistant", function_call={"name": "f"}),
        "tools.custom.format": {"tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "text"}}}]},
        "tools.function.strict": {"tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}]},
        **{f"messages.content[{kind}]": _block(type=kind) for kind in ("image_url", "input_audio", "file")},
    },
    RESPONSES: {
        "text.verbosity": {"text": {"verbosity": "low"}},
        "tools.format": {"tools": [{"type": "custom", "name": "f", "format": {"type": "text"}}]},
        "tools.strict": {"tools": [{"type": "function", "strict": True, **FUNCTION}]},
        "tools.tools.format": {
            "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f", "format": {}}]}]
        },
        "input.tools.tools.format": _item(
            "additional_tools",
            tools=[{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f", "format": {}}]}],
        ),
        **{
            f"input[{kind}]": _item(kind, id="x")
            for kind in (
                *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
                *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response", "computer_call"),
                *("computer_call_output", "tool_search_call", "tool_search_output", "program", "program_output"),
                "item_reference",
            )
        },
        **{
            f"tools[{kind}]": {"tools": [{"type": kind}]}
            for kind in ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "computer")
        },
        **{f"input.content[{kind}]": _heard(kind) for kind in ("input_image", "input_file", "input_audio")},
        **{f"input.output[{kind}]": _printed(kind) for kind in ("input_image", "input_file")},
    },
    ANTHROPIC: {
        "output_config.effort": {"output_config": {"effort": "low"}},
        "messages.output_config": _says(output_config={"effort": "low"}),
        "tool_choice.disable_parallel_tool_use": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "system.cache_control": {"system": [{"type": "text", "text": "a", "cache_control": {}}]},
        "tools.cache_control": {"tools": [{**BOUND, "cache_control": {}}]},
        "tools.strict": {"tools": [{**BOUND, "strict": True}]},
        "messages.content.cache_control": _block(type="text", text="a", cache_control={}),
        "messages.content.content.cache_control": _inner(type="text", text="a", cache_control={}),
        "messages.content.citations": _block(type="text", text="a", citations=[]),
        **{
            f"messages.content[{kind}]": _block(type=kind)
            for kind in (
                *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
                *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "fallback"),
                *("tool_search_tool_result", "mcp_tool_use", "mcp_tool_result", "advisor_tool_result"),
                "container_upload",
            )
        },
        **{
            f"tools[{kind}]": {"tools": [{"type": kind, "name": "f"}]}
            for kind in ("web_search_20250305", "web_fetch_20250910", "code_execution_20250825")
        },
        "messages.content[image]": _block(**IMAGE),
        "messages.content.content[image]": _inner(**IMAGE),
        **{f"messages.content.source[{kind}]": _block(**_document(kind)) for kind in ("base64", "url", "file")},
        **{f"messages.content.content.source[{kind}]": _inner(**_document(kind)) for kind in ("base64", "url", "file")},
    },
}
"""A request that says each field which does not stand at its top."""


def _decode(dialect, fields):
    return dialect.decode({**BASES[dialect], **fields}, {})


def _fields(table):
    return [pytest.param(d, path, id=f"{d.name}-{path}") for d in BASES for path in getattr(d.support, table)]


def _example(dialect, path):
    return EXAMPLES[dialect].get(path) or {path: ["x"]}


@pytest.mark.parametrize(("dialect", "path"), _fields("ignored"))
def test_an_ignored_field_is_listed(dialect, path):
    """The request is understood, and the call's fidelity names the field."""
    assert path in _decode(dialect, _example(dialect, path)).fidelity


@pytest.mark.parametrize(("dialect", "path"), _fields("refused"))
def test_a_refused_field_is_named(dialect, path):
    """In the error's text or as its field, with the part's kind where it is one."""
    with pytest.raises(BadRequest) as caught:
        _decode(dialect, _example(dialect, path))
    name = path.rpartition(".")[2]
    kind = name.removesuffix("]").rpartition("[")[2]
    wanted = "document" if ".source[" in path else kind
    assert wanted in f"{caught.value.field} {caught.value}"


@pytest.mark.parametrize(("dialect", "path"), _fields("refused"))
def test_a_refused_field_that_says_nothing_is_no_matter(dialect, path):
    """Null is absent."""
    if "." not in path and "[" not in path:
        assert path not in _decode(dialect, {path: None}).fidelity


SAMPLING = {
    "temperature": (0.5, Sampling(temperature=0.5)),
    "top_p": (0.5, Sampling(top_p=0.5)),
    "top_k": (5, Sampling(top_k=5)),
    "max_tokens": (5, Sampling(max_tokens=5)),
    "max_completion_tokens": (5, Sampling(max_tokens=5)),
    "max_output_tokens": (5, Sampling(max_tokens=5)),
    "seed": (5, Sampling(seed=5)),
    "stop": ("x", Sampling(stop=("x",))),
    "stop_sequences": (["x", "y"], Sampling(stop=("x", "y"))),
    "n": (3, Sampling(choices=3)),
    "logprobs": (True, Sampling(logprobs=True)),
    "include": (["message.output_text.logprobs", "reasoning.encrypted_content"], Sampling(logprobs=True)),
}


@pytest.mark.parametrize(
    ("dialect", "field"),
    [
        pytest.param(d, field, id=f"{d.name}-{field}")
        for d in BASES
        for field in d.support.supported
        if field in SAMPLING
    ],
)
def test_what_is_asked_of_the_sampling_is_recorded(dialect, field):
    """As it was asked, and nothing of it is listed as ignored."""
    value, sampling = SAMPLING[field]
    decoded = _decode(dialect, {"max_tokens": None, field: value})
    assert decoded.sampling == sampling
    assert decoded.fidelity == ()


CALLS = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]}
READ = {
    CHAT: {
        "tools": {"tools": [{"type": "function", "function": FUNCTION}]},
        "tool_choice": {"tool_choice": "none"},
        "stream": {"stream": True},
        "stream_options.include_usage": {"stream_options": {"include_usage": True}},
        "response_format": {"response_format": {"type": "json_object"}},
        "modalities": {"modalities": ["text"]},
        "prompt_cache_key": {"prompt_cache_key": "k"},
        "messages.reasoning_content": _says(role="assistant", reasoning_content="r"),
        "messages.reasoning": _says(role="assistant", reasoning="r"),
        "messages.reasoning_details": _says(role="assistant", reasoning_details=[{"text": "r"}]),
        "messages.refusal": _says(role="assistant", refusal="no"),
        "messages.tool_calls": {"messages": [CALLS]},
        "messages.tool_call_id": {"messages": [CALLS, {"role": "tool", "tool_call_id": "c", "content": "x"}]},
    },
    RESPONSES: {
        "instructions": {"instructions": "be good"},
        "tools": {"tools": [{"type": "function", **FUNCTION}]},
        "tool_choice": {"tool_choice": "none"},
        "stream": {"stream": True},
        "text.format": {"text": {"format": {"type": "json_object"}}},
        "prompt_cache_key": {"prompt_cache_key": "k"},
        "previous_response_id": {"previous_response_id": "resp_1"},
        "input[additional_tools]": _item("additional_tools", tools=[{"type": "function", **FUNCTION}]),
        "input[compaction]": _item("compaction", id="cmp_x", encrypted_content="x.aGk="),
        "input[compaction_trigger]": _item("compaction_trigger"),
        "input[reasoning]": _item("reasoning", id="rs_x", summary=[{"type": "summary_text", "text": "r"}]),
        "input[function_call]": _item("function_call", call_id="c", name="f", arguments="{}"),
        "input[custom_tool_call]": _item("custom_tool_call", call_id="c", name="f", input="x"),
        "input[local_shell_call]": _item("local_shell_call", call_id="c", action={"type": "exec", "command": ["ls"]}),
        "input[shell_call]": _item("shell_call", call_id="c", action={"commands": ["ls"]}),
        "input[apply_patch_call]": _item("apply_patch_call", call_id="c", operation={"type": "delete_file"}),
        **{
            f"input[{kind}_output]": _item(f"{kind}_output", call_id="c", output="out")
            for kind in ("function_call", "custom_tool_call", "local_shell_call", "apply_patch_call")
        },
        "input[shell_call_output]": _item("shell_call_output", call_id="c", output=[{"stdout": "out"}]),
    },
    ANTHROPIC: {
        "system": {"system": "be good"},
        "tools": {"tools": [BOUND]},
        "tool_choice": {"tool_choice": {"type": "none"}},
        "stream": {"stream": True},
        "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
        "output_format": {"output_format": {"type": "json_schema", "schema": {}}},
        "diagnostics.previous_message_id": {"diagnostics": {"previous_message_id": "msg_1"}},
        "tools.defer_loading": {"tools": [{**BOUND, "defer_loading": False}]},
        **{
            f"tools[{kind}]": {"tools": [{"type": kind, "name": "f"}]}
            for kind in ("bash_20250124", "text_editor_20250728", "memory_20250818")
        },
        "messages.content[text]": _block(type="text", text="a"),
        "messages.content[tool_use]": _says(
            role="assistant", content=[{"type": "tool_use", **BOUND, "id": "c", "input": {}}]
        ),
        "messages.content[tool_result]": _inner(type="text", text="a"),
        "messages.content[thinking]": _says(role="assistant", content=[{"type": "thinking", "thinking": "r"}]),
        "messages.content[redacted_thinking]": _says(
            role="assistant", content=[{"type": "redacted_thinking", "data": "x"}]
        ),
        "messages.content[search_result]": _block(type="search_result", title="t", source="s", content=[]),
        "messages.content[document]": _block(type="document", source={"type": "text", "data": "a"}),
        "messages.content[compaction]": _says(role="assistant", content=[{"type": "compaction", "content": "a"}]),
    },
}
"""A request that says each supported field that is not of the sampling."""
REQUIRED = {"model", "messages", "input"}


@pytest.mark.parametrize(
    ("dialect", "path"),
    [p for p in _fields("supported") if p.values[1] not in REQUIRED and p.values[1] not in SAMPLING],
)
def test_a_supported_field_is_read(dialect, path):
    """It is no longer the same request, or an allowed value of it is taken; and nothing is listed as ignored."""
    decoded = _decode(dialect, READ[dialect][path])
    assert decoded.fidelity == ()
    unmarked = path in ("tool_choice", "modalities", "tools.defer_loading", "messages.content[redacted_thinking]")
    assert unmarked or decoded != _decode(dialect, {})
    assert all(isinstance(message, Message) for message in decoded.messages)
