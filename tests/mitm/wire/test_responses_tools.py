"""The tools of a Responses request, and the calls of them."""

import json

import pytest

from polar_mitm.conversation import Reply, Tool, ToolCall, canonical
from polar_mitm.wire.openai_responses import OpenAIResponses
from polar_mitm.wire.responses_tools import BUILT_INS, spaced_names
from tests.mitm.wire.replies import CORE, REQUEST, golden

RESPONSES = OpenAIResponses()
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def _decode(**body):
    return RESPONSES.decode({"model": "m", "input": "hi", **body}, {})


def test_a_call_names_the_name_space_that_the_tool_was_declared_in():
    """`functions` is the default and is left out; a custom tool's input is raw."""
    calls = (ToolCall("call_1", "spawn", "{}"), ToolCall("call_2", "exec", "js()", custom=True))
    _, spawn, execute = RESPONSES.encode(REQUEST, Reply(CORE, calls, "tool_calls"))["output"]
    assert (spawn["type"], spawn["namespace"], spawn["name"]) == ("function_call", "agents", "spawn")
    assert (execute["type"], execute["name"], execute["input"]) == ("custom_tool_call", "exec", "js()")
    assert "namespace" not in execute


def test_tools_of_one_name_in_two_name_spaces_stay_apart():
    """The later one gets a longer name for the model, and its own back for the harness."""
    spaces = [{"type": "namespace", "name": name, "tools": [FUNCTION]} for name in ("a", "b")]
    call = {"type": "function_call", "call_id": "call_1", "namespace": "b", "name": "f", "arguments": "{}"}
    request = _decode(tools=spaces, input=[{"role": "user", "content": "hi"}, call])
    assert [tool.name for tool in request.tools] == ["f", "b.f"]
    assert request.messages[1].parts[0].name == "b.f"
    *_, item = RESPONSES.encode(request, Reply(CORE, (ToolCall("call_2", "b.f", "{}"),), "tool_calls"))["output"]
    assert (item["namespace"], item["name"]) == ("b", "f")


def test_tools_come_from_the_top_from_name_spaces_and_from_items():
    """Server tools are left out and listed."""
    plain = golden("codex-0.171.0.tool-turn")
    conversation = RESPONSES.decode(plain["body"], plain["headers"])
    assert ("spawn_agent", "multi_agent_v1") in [(tool.name, tool.namespace) for tool in conversation.tools]
    assert "tools[web_search]" in conversation.fidelity
    lite = golden("codex-0.171.0.custom-tool-turn")
    conversation = RESPONSES.decode(lite["body"], lite["headers"])
    assert next(tool for tool in conversation.tools if tool.custom).name == "exec"
    output = conversation.messages[-1].parts[0].text
    assert output.startswith("Script completed\n")
    assert output.endswith("Output:\nwrote 0: bonjour, café")


def test_a_tool_is_called_by_its_own_name_in_its_name_space():
    """The default name space may be left out, unless the tool had to be renamed."""
    assert spaced_names(Tool("f", "", "{}")) == (("", "f"),)
    assert spaced_names(Tool("f", "", "{}", namespace="a")) == (("a", "f"),)
    assert spaced_names(Tool("f", "", "{}", namespace="functions")) == (("", "f"), ("functions", "f"))
    assert spaced_names(Tool("functions.f", "", "{}", namespace="functions")) == (("functions", "f"),)


@pytest.mark.parametrize(
    ("name", "arguments", "held"),
    [
        ("local_shell", {"command": ["ls", "-l"], "timeout_ms": 5}, {"type": "exec", "env": {}}),
        ("shell", {"commands": ["ls", "pwd"], "max_output_length": 10}, {}),
        ("apply_patch", {"type": "update_file", "path": "a", "diff": "@@"}, {}),
    ],
)
def test_a_built_in_tool_is_offered_called_and_answered(name, arguments, held):
    """The model sees a function; the harness gets the provider's own item and sends it back."""
    declared = _decode(tools=[{"type": name}])
    (tool,) = declared.tools
    assert json.loads(tool.parameters)["required"] == [next(iter(arguments))]
    reply = Reply(CORE, (ToolCall("call_1", name, json.dumps(arguments)),), "tool_calls")
    _, item = RESPONSES.encode(declared, reply)["output"]
    assert item["type"] == f"{name}_call"
    assert item[BUILT_INS[name].field] == {**held, **arguments}
    output = [{"stdout": "out", "stderr": ""}] if name == "shell" else "out"
    result = {"type": f"{name}_call_output", "call_id": "call_1", "output": output, "status": "failed"}
    again = _decode(tools=[{"type": name}], input=[{"role": "user", "content": "hi"}, item, result])
    assert canonical(again.messages[1]) == canonical(reply.message)
    (answer,) = again.messages[2].parts
    assert (answer.call_id, answer.is_error) == ("call_1", True)
    assert "out" in answer.text


def test_a_built_in_call_without_an_object_is_the_first_argument():
    """The harness objects to it, and the run goes on."""
    declared = _decode(tools=[{"type": "shell"}])
    _, item = RESPONSES.encode(declared, Reply(CORE, (ToolCall("call_1", "shell", "ls"),), "tool_calls"))["output"]
    assert item["action"] == {"commands": "ls"}
