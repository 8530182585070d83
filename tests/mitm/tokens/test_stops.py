"""Stop strings in a text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.tokens.stops import first, held

letters = st.text("ab", min_size=1, max_size=4)


def test_the_first_place_counts_then_the_order_of_the_request() -> None:
    """Whatever the length; an empty stop ends nothing."""
    assert first("one two", ("two", "one")) == (0, "one")
    assert first("one two", ("on", "one")) == (0, "on")
    assert first("one two", ("", "three")) is None


def test_what_may_begin_a_stop_is_held() -> None:
    """The longest end of the text that does."""
    assert held("one E", ("END",)) == 1
    assert held("one EN", ("END", "N.")) == 2
    assert held("one", ("END",)) == held("one", ()) == 0


@given(st.text("ab", max_size=12), st.lists(letters, max_size=3).map(tuple), st.text("ab", max_size=4))
def test_a_stop_never_begins_before_what_is_held(text: str, stops: tuple[str, ...], more: str) -> None:
    """However the text goes on, a stop that is not there yet begins in the held end or behind it."""
    found = first(text + more, stops)
    if first(text, stops) is None and found is not None:
        assert found[0] >= len(text) - held(text, stops)
