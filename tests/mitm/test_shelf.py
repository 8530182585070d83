"""Values by key, the newest within a number of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.shelf import Shelf


def test_a_value_is_looked_at_or_taken() -> None:
    """Getting leaves it, popping takes it."""
    shelf: Shelf[str, int] = Shelf(10)
    shelf.put("a", 1, 5)
    assert (shelf.get("a"), "a" in shelf, shelf.pop("a"), shelf.pop("a"), shelf.get("a")) == (1, True, 1, None, None)


def test_the_oldest_fall_off() -> None:
    """As many as it takes."""
    shelf: Shelf[str, int] = Shelf(10)
    for name in "abc":
        shelf.put(name, 0, 4)
    assert [name in shelf for name in "abc"] == [False, True, True]


def test_a_value_larger_than_the_shelf_is_not_taken() -> None:
    """It does not push the others off, and replaces none."""
    shelf: Shelf[str, int] = Shelf(10)
    shelf.put("a", 0, 4)
    shelf.put("b", 0, 11)
    assert ("a" in shelf, "b" in shelf) == (True, False)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=30))
def test_there_are_never_more_bytes_than_allowed(puts: list[tuple[int, int]]) -> None:
    """Whatever is put, replaced and pushed off."""
    shelf: Shelf[int, int] = Shelf(20)
    for key, size in puts:
        shelf.put(key, size, size)
        kept = [value for k in range(6) if (value := shelf.get(k)) is not None]
        assert sum(kept) <= 20
        assert len(kept) == len(shelf)
