"""The official SDKs agree: what a stream adds up to is what the plain answer says, field for field."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.judges.answers import answers, asked, streams
from tests.judges.clients import JUDGES, PREFIXES, PROVIDER


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.dialect.name)
@settings(max_examples=60)
@given(data=st.data())
def test_a_stream_adds_up_to_the_plain_answer(judge, data):
    """Any reply, cut anywhere by the encoder and by the network."""
    dialect = judge.dialect
    prefix = PREFIXES[dialect.name]
    reply = data.draw(answers(prefix, choices=judge.choices, scored=judge.scored, custom=judge.custom))
    stream = data.draw(streams(dialect, reply))
    PROVIDER.give(json.dumps(dialect.encode(asked(reply), reply)).encode())
    plain = judge.plain()
    PROVIDER.give(stream, "text/event-stream", size=data.draw(st.sampled_from([1, 7, 1000])))
    assert judge.streamed() == plain
