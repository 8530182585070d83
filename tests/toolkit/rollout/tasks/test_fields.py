"""Fields are taken by type, and refused by name."""

from __future__ import annotations

import datetime

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.tasks.fields import Fields, made_id, plain, task_id


def test_what_nobody_took_is_told_by_its_path() -> None:
    """Also in tables, and in lists of tables."""
    fields = Fields("f", {"a": 1, "t": {"b": 2}, "l": [{"c": 3}], "null": None})
    fields.table("t")
    fields.tables("l")
    assert fields.left() == ["a", "t.b", "l[0].c"]


@pytest.mark.parametrize("value", [0, -1, True, "1", float("nan")])
def test_a_number_is_more_than_0(value: object) -> None:
    """Booleans and strings are none."""
    with pytest.raises(Refusal, match=r"f: t\.n is .*: write a number more than 0"):
        Fields("f", {"n": value}, "t").number("n", 1.0)


@pytest.mark.parametrize("value", [0, 1.5, True])
def test_a_count_is_whole(value: object) -> None:
    """And more than 0."""
    with pytest.raises(Refusal, match=r"f: n is .*: write a whole number"):
        Fields("f", {"n": value}).count("n", 1)


def test_a_missing_field_is_said_to_be_missing() -> None:
    """By its first name."""
    with pytest.raises(Refusal, match="f: image is missing: write a string"):
        Fields("f", {}).text("image", "docker_image")


def test_words_and_texts_are_strings() -> None:
    """Each of them."""
    with pytest.raises(Refusal, match="f: w is 1: write a list of strings"):
        Fields("f", {"w": ["a", 1]}).words("w")
    with pytest.raises(Refusal, match=r"f: env\.A is 1: write a string"):
        Fields("f", {"env": {"A": 1}}).texts("env")


def test_a_long_value_is_shortened() -> None:
    """A message stands on a terminal."""
    with pytest.raises(Refusal, match=r"f: n is 'x{70,76}\.\.\.: write"):
        Fields("f", {"n": "x" * 500}).number("n", 1)


def test_an_id_can_name_a_session() -> None:
    """1 to 80 of some characters: it is part of file names and of user names."""
    fields = Fields("f", {})
    assert task_id("django__django-1.2", fields) == "django__django-1.2"
    for name in ("", "a b", "a/b", "x" * 81):
        with pytest.raises(Refusal, match=r"f: id is .*: 1 to 80 letters"):
            task_id(name, fields)


def test_a_foreign_name_is_made_an_id() -> None:
    """Two long names stay two."""
    assert made_id("org/name with blanks") == "org-name-with-blanks"
    long, longer = made_id("x" * 200), made_id("x" * 201)
    assert len(long) == len(longer) == 80
    assert long != longer


def test_metadata_is_json() -> None:
    """Dates of TOML become text."""
    assert plain({"day": datetime.date(2026, 11, 30)}) == {"day": "2026-11-30"}
