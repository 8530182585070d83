"""The frame of a request."""

import pytest

from polar_mitm.conversation import Message, Sampling, Text, Tool
from polar_mitm.errors import BadRequest
from polar_mitm.wire.dialect import Support
from polar_mitm.wire.frame import Choice, conversation, opened

SUPPORT = Support(
    supported=("model",),
    ignored={"a.b": "harmless", "c": "harmless"},
    refused={"d": "leave it out", "e[image]": "send text"},
)


def _opened(body):
    return opened(body, SUPPORT, lambda part, remedy: BadRequest(f"{part.path} is an {part.text('type')}: {remedy}"))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"d": 1}, "d: not supported: leave it out, got 1"),
        ({"e": [{"type": "image"}]}, r"e\[0\] is an image: send text"),
    ],
)
def test_what_the_table_refuses_is_refused(body, problem):
    """A field with its remedy, a part in the protocol's own words."""
    with pytest.raises(BadRequest, match=problem):
        _opened(body)


def test_what_the_table_ignores_is_listed_when_it_says_something():
    """Beside what nobody read."""
    request, history = _opened({"model": "m", "a": [{"b": False}], "c": None, "x": 1, "d": None})
    history.add(Message("user", (Text("hi"),)))
    tool = Tool("f", "", "{}")
    decoded = conversation(
        request, history, messages="messages", choice=Choice((tool,), "f"), sampling=Sampling(), thread="t"
    )
    assert set(decoded.fidelity) == {"a", "a.b", "x"}
    assert (decoded.tools, decoded.forced_tool, decoded.thread) == ((tool,), "f", "t")


def test_a_request_without_messages_is_refused():
    """The field that gave none is named."""
    request, history = _opened({"model": "m"})
    with pytest.raises(BadRequest, match="messages: at least one"):
        conversation(request, history, messages="messages", choice=Choice(()), sampling=Sampling(), thread=None)
