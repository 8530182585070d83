"""Typed reading of JSON."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.errors import BadRequest
from polar_mitm.wire.fields import Fields, compact

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
READERS = [
    "text",
    "maybe_text",
    "flag",
    "integer",
    "number",
    "child",
    "wanted_child",
    "items",
    "children",
    "texts",
    "schema",
]


@given(JSON, st.sampled_from(READERS))
def test_reading_gives_a_value_or_a_bad_request(value, reader):
    """No JSON makes a reader raise anything but BadRequest."""
    with suppress(BadRequest):
        getattr(Fields({"a": value}), reader)("a")


def test_a_mistake_names_the_path_and_the_value():
    """The message says where, what was expected and what came."""
    message = Fields({"messages": [{"role": 7}]}).children("messages")[0]
    with pytest.raises(BadRequest, match=r"^messages\[0\]\.role: expected a string, got 7$"):
        message.text("role")


def test_a_long_value_is_cut_in_the_message():
    """An error stays short, however long the value."""
    with pytest.raises(BadRequest) as caught:
        Fields({"n": "x" * 1000}).integer("n")
    assert len(str(caught.value)) < 130


def test_a_missing_field_is_named():
    """A field that must be there is named when it is not."""
    with pytest.raises(BadRequest, match="model: missing"):
        Fields({}).text("model")


@pytest.mark.parametrize("value", [True, 1.5, "1"])
def test_an_integer_is_neither_a_flag_nor_a_float_nor_a_string(value):
    """JSON's types are not converted."""
    with pytest.raises(BadRequest):
        Fields({"n": value}).integer("n")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, True])
def test_a_number_is_finite(value):
    """NaN, infinities and integers beyond a float are refused."""
    with pytest.raises(BadRequest):
        Fields({"n": value}).number("n")


def test_what_nobody_read_is_listed():
    """Unread fields that say something are listed, null ones are not, and read ones only when told to be ignored."""
    fields = Fields({"a": 1, "b": 2, "c": None, "d": 3})
    fields.value("a"), fields.value("d")
    assert fields.unread(("d",)) == ("b", "d")


def test_a_body_that_is_no_object_is_refused():
    """A request must be an object."""
    with pytest.raises(BadRequest, match="body: expected an object"):
        Fields([1])


def test_compact_json_keeps_the_order_of_keys():
    """No spaces, no escapes, no sorting."""
    assert compact({"b": "é", "a": [1, 2]}) == '{"b":"é","a":[1,2]}'


TREE = {"a": [{"type": "x", "b": 1}, {"type": "y", "b": {"c": 2}}, 3, {"b": None}], "d": {"e": 0}, "f": "text"}


@pytest.mark.parametrize(
    ("path", "places"),
    [
        ("f", ["f"]),
        ("g", []),
        ("a.b", ["a[0].b", "a[1].b"]),
        ("a.b.c", ["a[1].b.c"]),
        ("d.e", ["d.e"]),
        ("a[x]", ["a[0].type"]),
        ("a[y].b", ["a[1].b"]),
        ("a[z]", []),
        ("f.g", []),
    ],
)
def test_a_path_finds_what_says_something(path, places):
    """Through objects and arrays, by the type where it is given; and nothing counts as read."""
    fields = Fields(TREE)
    assert [owner.at(name) for owner, name in fields.found(path)] == places
    assert fields.unread() == ("a", "d", "f")


@given(JSON, st.sampled_from(["a", "a.b", "a[x]", "a[x].b", "a.a.a"]))
def test_looking_never_fails(value, path):
    """What has another shape is not found."""
    list(Fields({"a": value}).found(path))


@pytest.mark.parametrize("value", ["x", [1], ["x", ""]])
def test_texts_are_strings_that_say_something(value):
    """An array of them."""
    with pytest.raises(BadRequest, match="a: expected"):
        Fields({"a": value}).texts("a")


def test_an_error_knows_its_field():
    """So that a provider's error can name it."""
    with pytest.raises(BadRequest) as caught:
        Fields({"a": [{"b": 1}]}).children("a")[0].text("b")
    assert caught.value.field == "a[0].b"
