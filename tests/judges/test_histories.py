"""The official SDKs as harnesses: what they send is understood, and what they send back is the reply they got."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar_mitm.conversation import Conversation, Message, Text, ToolCall, canonical
from polar_mitm.routes import Treatment, find
from tests.judges.answers import answers, streams
from tests.judges.clients import JUDGES, PREFIXES, PROVIDER
from tests.mitm.wire.replies import CORE


def _decoded(dialect) -> Conversation:
    """The last request that the SDK made, on the way that any request goes."""
    asked = PROVIDER.asked
    match = find(asked.method, asked.url.host, asked.url.path, asked.url.query.decode(), dict(asked.headers))
    assert match.treatment is Treatment.GENERATE
    assert match.dialect is dialect
    return dialect.decode({**json.loads(asked.content), **match.fields}, dict(asked.headers))


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.dialect.name)
@settings(max_examples=40)
@given(data=st.data())
def test_a_history_kept_by_the_sdk_is_the_same_history(judge, data):
    """The SDK's own objects, sent back, are the reply's canonical message; an id in them names the reply."""
    dialect = judge.dialect
    reply = data.draw(answers(PREFIXES[dialect.name], choices=False, scored=False, custom=judge.custom))
    PROVIDER.give(data.draw(streams(dialect, reply)), "text/event-stream")
    judge.carried_on()
    conversation = _decoded(dialect)
    assert conversation.model == "m"
    assert conversation.stream
    assert [message.role for message in conversation.messages] == ["user", "assistant", "user"]
    assert conversation.messages[2] == Message("user", (Text("go on"),))
    assert canonical(conversation.messages[1]) == canonical(reply.message)
    calls = [part.id for part in reply.parts if isinstance(part, ToolCall)]
    assert set(calls) <= set(conversation.echoes)
    assert any(CORE in echo for echo in conversation.echoes)
