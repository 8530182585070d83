"""Tables of a TOML file as dataclasses: each wrong key and value has its sentence."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import pytest

from polar_train.errors import BadInput
from polar_train.tables import load


class Colour(StrEnum):
    """Some choice."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Things:
    """One field of each type."""

    place: Path
    size: int = 3
    seed: int = 0
    share: float = 0.5
    most: int | None = None
    on: bool = False
    word: Literal["a", "b"] = "a"
    colour: Colour = Colour.RED
    names: tuple[str, ...] = ()
    pools: Mapping[str, int] | None = None
    anything: Mapping[str, Any] | None = None


@pytest.fixture
def things(tmp_path):
    """Reads a text as Things."""

    def make(text: str) -> Things:
        file = tmp_path / "some.toml"
        file.write_text(text)
        return load(file).fill(Things)

    return make


def test_what_is_not_there_has_its_default(things, tmp_path):
    """And a path is relative to the file."""
    assert things("place = 'x/y'") == Things(tmp_path / "x" / "y")


def test_each_type_is_read(things, tmp_path):
    """As TOML writes it."""
    read = things(
        "place = '/x'\nsize = 5\nshare = 1\nmost = 2\non = true\nword = 'b'\ncolour = 'blue'\nnames = ['x']\n"
        "pools = {init = 1}\nanything = {x = [1, 'y']}"
    )
    assert read == Things(
        Path("/x"), 5, 0, 1, 2, True, "b", Colour.BLUE, ("x",), pools={"init": 1}, anything={"x": [1, "y"]}
    )
    assert isinstance(read.colour, Colour)


FAULTS = {
    "a key that nobody knows": ("sise = 4", r"sise is no key: the file has anything, colour, .*, size, word"),
    "a word for a number": ("size = 'x'", r"size is 'x': write a whole number of at least 1"),
    "a truth for a number": ("size = true", r"size is True: write a whole number of at least 1"),
    "a number that is not whole": ("size = 1.5", r"size is 1.5: write a whole number"),
    "nothing of what is counted": ("size = 0", r"size is 0: write a whole number of at least 1"),
    "a negative seed": ("seed = -1", r"seed is -1: write a whole number of at least 0"),
    "a number that is none": ("share = nan", r"share is nan: write a number of at least 0"),
    "a negative number": ("share = -0.5", r"share is -0.5: write a number of at least 0"),
    "an optional value of another type": ("most = 'x'", r"most is 'x': write a whole number"),
    "a number for a truth": ("on = 1", r"on is 1: write true or false"),
    "a word of no choice": ("word = 'c'", r"word is 'c': write one of 'a', 'b'"),
    "a choice that is not there": ("colour = 'green'", r"colour is 'green': write one of 'red', 'blue'"),
    "a word for a list": ("names = 'x'", r"names is 'x': write a list of strings"),
    "a number in a list of strings": ("names = [1]", r"names is \[1\]: write a list of strings"),
    "a word in a table of numbers": ("pools = {init = 'x'}", r"\[pools\] init is 'x': write a whole number"),
    "a number for a table": ("anything = 3", r"anything is 3: write a table"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_told_with_key_value_and_remedy(things, fault):
    """One sentence that names the file."""
    text, sentence = FAULTS[fault]
    with pytest.raises(BadInput, match=sentence) as refused:
        things(f"place = 'x'\n{text}")
    assert "some.toml': " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_is_missing_is_named(things):
    """With what to add."""
    with pytest.raises(BadInput, match="place is missing: add a path, relative to this file"):
        things("")


@pytest.mark.parametrize("text", ["place = ", "\0", "x = 1\nx = 2"])
def test_what_is_no_toml_is_refused(things, text):
    """With the parser's place."""
    with pytest.raises(BadInput, match=r"some.toml' cannot be read as TOML: "):
        things(text)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """By its path."""
    with pytest.raises(BadInput, match=r"none.toml' cannot be read"):
        load(tmp_path / "none.toml")
