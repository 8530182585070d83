"""Framing of server-sent events."""

import json

from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.wire import sse


@given(st.text())
def test_an_event_is_one_line_that_reads_back(text):
    """Whatever the text, lone surrogates included, an event is one data line and its JSON is the same value."""
    line, end = sse.data({"text": text}).removesuffix(b"\n\n"), b"\n\n"
    assert json.loads(line.removeprefix(b"data: ")) == {"text": text}
    assert len(line.decode().splitlines()) == 1
    assert sse.data({"text": text}) == line + end


def test_an_event_is_named_by_its_type():
    """The `event:` line repeats the value's type."""
    assert sse.event({"type": "ping"}) == b'event: ping\ndata: {"type":"ping"}\n\n'


def test_text_stays_as_it_is():
    """Text beyond ASCII is UTF-8, not escapes."""
    assert sse.json_bytes({"a": "é😀"}) == '{"a":"é😀"}'.encode()
