"""What holds for every dialect: routes, stream grammar, echoes, fuzzed requests, golden requests."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_mitm.conversation import Reply, Text, ToolCall, canonical
from polar_mitm.errors import BadRequest, ContextOverflow, EngineUnavailable
from polar_mitm.routes import find
from polar_mitm.wire import DIALECTS
from tests.mitm.wire.replies import CORE, GOLDEN, REQUEST, began, events, golden, replies, streamed, streams

RESPONSES, CHAT, ANTHROPIC, GEMINI = DIALECTS
PREFIX = {RESPONSES.name: "call", CHAT.name: "call", ANTHROPIC.name: "toolu", GEMINI.name: ""}
TERMINAL = {
    RESPONSES.name: {"response.completed", "response.incomplete", "response.failed"},
    CHAT.name: {"[DONE]"},
    ANTHROPIC.name: {"message_stop", "error"},
    GEMINI.name: {"STOP", "MAX_TOKENS"},
}
REFUSED = {
    "pi-1.6.0.anthropic-thread": "thread: Extra inputs are not permitted",
}
each_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["text", "user"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner),
    max_leaves=4,
)


def _replies(dialect):
    return replies(PREFIX[dialect.name], custom=dialect not in (ANTHROPIC, GEMINI))


def _echo(dialect, reply):
    """The request of a faithful harness that has got this reply and says one thing more."""
    answer = json.loads(json.dumps(dialect.encode(REQUEST, reply)))
    body = {"model": "m", "tools": _declared(dialect)}
    if dialect is RESPONSES:
        turns = [{"role": "user", "content": "hi"}, *answer["output"], {"role": "user", "content": "go on"}]
        return {**body, "input": turns}
    if dialect is GEMINI:
        asked, more = ({"role": "user", "parts": [{"text": text}]} for text in ("hi", "go on"))
        return {**body, "contents": [asked, answer["candidates"][0]["content"], more]}
    message = answer["choices"][0]["message"] if dialect is CHAT else {k: answer[k] for k in ("role", "content")}
    turns = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "go on"}]
    return {**body, "max_tokens": 100, "messages": turns}


def _declared(dialect):
    if dialect is GEMINI:
        return [{"functionDeclarations": [{"name": name} for name in ("run", "spawn")]}]
    if dialect is ANTHROPIC:
        return [{"name": name, "input_schema": {}} for name in ("run", "spawn")]
    if dialect is CHAT:
        return [{"type": "function", "function": {"name": "run"}}, {"type": "custom", "custom": {"name": "edit"}}]
    return [
        {"type": "function", "name": "run"},
        {"type": "custom", "name": "edit"},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]},
    ]


def _mentions(value, core):
    if isinstance(value, dict):
        return [hit for item in value.values() for hit in _mentions(item, core)]
    if isinstance(value, list):
        return [hit for item in value for hit in _mentions(item, core)]
    return [value] if isinstance(value, str) and core in value else []


@each_dialect
@given(data=st.data())
def test_a_faithful_harness_echoes_the_same_reply(dialect, data):
    """Decoding an echoed answer gives the reply's canonical message, and an id that names the reply."""
    reply = data.draw(_replies(dialect))
    conversation = dialect.decode(_echo(dialect, reply), {})
    assert [message.role for message in conversation.messages] == ["user", "assistant", "user"]
    assert canonical(conversation.messages[1]) == canonical(reply.message)
    pointers = [echo for echo in conversation.echoes if CORE in echo]
    calls = [part.id for part in reply.parts if isinstance(part, ToolCall)]
    assert [call for call in calls if call not in pointers] == []
    assert pointers or dialect is CHAT


@each_dialect
@given(data=st.data())
def test_a_stream_ends_with_its_only_terminal_event(dialect, data):
    """Events parse, one terminal event, and it is the last."""
    stream = b"".join(data.draw(streams(dialect, data.draw(_replies(dialect)))))
    kinds = [_type(dialect, value) for _, value in events(stream)]
    assert [kind for kind in kinds if kind in TERMINAL[dialect.name]] == kinds[-1:]
    assert kinds[-1] in TERMINAL[dialect.name]


def _type(dialect, value):
    if dialect is GEMINI:
        return value["candidates"][0].get("finishReason")
    return value if isinstance(value, str) else value.get("type")


@each_dialect
@given(data=st.data())
def test_ids_carry_the_core_and_stay_short(dialect, data):
    """Every id of an answer is at most 64 characters of [A-Za-z0-9_-]."""
    reply = data.draw(_replies(dialect))
    ids = _mentions(dialect.encode(REQUEST, reply), CORE)
    assert ids
    assert all(len(item) <= 64 and item.replace("_", "").replace("-", "").isalnum() for item in ids)


@each_dialect
def test_a_tool_call_leaves_only_in_finish(dialect):
    """Nothing of a call is sent before the call is durable."""
    call = ToolCall(f"{PREFIX[dialect.name]}_{CORE}0", "run", '{"cmd":"ls"}')
    encoder = dialect.encoder(REQUEST, CORE)
    before = encoder.begin() + encoder.delta("text", "I'll look.")
    assert b'"run"' not in before
    assert b"ls" in encoder.finish(Reply(CORE, (Text("I'll look."), call), "tool_calls"))


@each_dialect
def test_a_ping_carries_data_and_changes_nothing(dialect):
    """A keep-alive is an event with data, not a comment; Gemini has none, its clients wait for the headers only."""
    ping = dialect.encoder(REQUEST, CORE).ping
    assert ping == b"" if dialect is GEMINI else b"data: {" in ping


@each_dialect
def test_an_empty_delta_sends_nothing(dialect):
    """Only text opens an item."""
    assert began(dialect.encoder(REQUEST, CORE)).delta("text", "") == b""


@each_dialect
def test_a_failed_stream_says_so_and_ends(dialect):
    """The error's message is in the last event, and no success follows."""
    encoder = began(dialect.encoder(REQUEST, CORE))
    encoder.delta("reasoning", "hm")
    (_, value), *more = events(encoder.fail(EngineUnavailable("the engine is away")))
    assert not more
    assert "the engine is away" in json.dumps(value)


@each_dialect
def test_a_plain_error_is_json_with_a_status(dialect):
    """400 stays 400; an overloaded engine is what its provider says."""
    assert dialect.status(ContextOverflow(2, 1)) == 400
    assert dialect.status(EngineUnavailable("x")) == (529 if dialect is ANTHROPIC else 503)
    assert "error" in dialect.error(BadRequest("x"))


@each_dialect
def test_a_model_name_with_a_lone_surrogate_comes_back(dialect):
    """What JSON can say in a request, an answer can say too."""
    body = _echo(dialect, Reply(CORE, (Text("x"),), "stop")) | {"model": "\ud800"}
    assert b"\\ud800" in streamed(dialect, Reply(CORE, (), "stop"), dialect.decode(body, {}))


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.iterdir()))
def test_requests_of_real_harnesses_decode(name):
    """Every captured request is understood, except what is refused by name."""
    request = golden(name)
    found = _route(request)
    if name in REFUSED:
        with pytest.raises(BadRequest, match=REFUSED[name]):
            found.dialect.decode(request["body"], request["headers"])
        return
    conversation = found.dialect.decode({**request["body"], **found.fields}, request["headers"])
    assert conversation.messages[0].role == "system"
    if "tool-turn" in name or "subagent" in name:
        roles = [message.role for message in conversation.messages]
        call = conversation.messages[roles.index("assistant")].parts[-1]
        assert call.id == conversation.messages[roles.index("tool")].parts[0].call_id
        # Pi drops Google's call ids and returns the thought signature
        assert call.id in conversation.echoes or name == "pi-1.6.0.gemini-tool-turn"
        assert call.name in [tool.name for tool in conversation.tools]


def _route(request):
    path, _, query = request["path"].partition("?")
    return find(request["method"], request["host"], path, query, request["headers"])


def _places(value, path=()):
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield from _places(inner, (*path, key))


def _replaced(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(copy[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.iterdir() if path.stem not in REFUSED))
@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_request_is_refused_or_understood(name, data):
    """Arbitrary JSON at an arbitrary place raises BadRequest or nothing; what decodes also encodes."""
    request = golden(name)
    places = list(_places(request["body"]))
    damaged = _replaced(request["body"], data.draw(st.sampled_from(places)), data.draw(JSON))
    found = _route(request)
    with suppress(BadRequest):
        body = {**damaged, **found.fields} if isinstance(damaged, dict) else damaged
        conversation = found.dialect.decode(body, request["headers"])
        assert streamed(found.dialect, Reply(CORE, (Text("x"),), "stop"), conversation)
