"""What a harness.toml may say, and what becomes of the instruction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout import recipe
from polar_toolkit.rollout.recipe import Way, command_of
from polar_toolkit.rollout.sandbox import Command

LEAST = """
name = "tiny"
version = "1.0"

[runs.chat]
host = "api.openai.com"
dialect = "openai_chat"
command = ["tiny", "{task}"]
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a harness.toml: the least one, with lines before its first table and after all; gives its folder."""

    def written(before: str = "", after: str = "", *, without: str = "") -> Path:
        text = LEAST.replace(without, "").replace("[runs.chat]", f"{before}\n[runs.chat]") + after
        (tmp_path / "harness.toml").write_text(text)
        return tmp_path

    return written


def test_a_name_and_one_way_are_enough(write: Write):
    """The only way is the default one; its program says its version."""
    found = recipe.load(write())
    assert (found.default, found.way().name, found.version_command) == ("chat", "chat", ("tiny", "--version"))
    assert (found.programs, found.names, found.shell_tool, found.package) == ((), (), ("", ""), "")


def test_every_harness_of_the_project_can_be_read():
    """Each is found by its name, and has a default way."""
    assert len(recipe.names()) == 8
    for name in recipe.names():
        assert recipe.find(name).way().command


def test_a_folder_of_the_users_own_is_found_by_its_path(write: Write):
    """A harness is added by writing one folder."""
    assert recipe.find(str(write())).name == "tiny"


def test_an_unknown_harness_is_refused_with_the_known_ones():
    """The sentence lists what there is."""
    with pytest.raises(Refusal, match=r"no harness is called 'pii'.*there are claude-code, codex"):
        recipe.find("pii")


def test_an_unknown_way_is_refused_with_the_known_ones(write: Write):
    """The sentence lists what there is."""
    with pytest.raises(Refusal, match="harness 'tiny' has no way 'google'; it has chat"):
        recipe.load(write()).way("google")


@pytest.mark.parametrize(
    ("before", "after", "without", "sentence"),
    [
        ("", "", 'name = "tiny"', "name is missing: write a string that is not empty"),
        ('package = ["a"]', "", "", "package is ['a']: write a string"),
        ("color = 1", "", "", "color is 1: there is no such field"),
        ("", "shell = true", "", "runs.chat.shell is True: there is no such field"),
        ('default = "x"', "", "", "default is 'x': name one of the ways: chat"),
        ('programs = "pi"', "", "", "programs is 'pi': write a list of strings"),
        ('names = ["https://x.com"]', "", "", "names is 'https://x.com': it has to look like"),
        ('shell_tool = ["bash"]', "", "", "shell_tool is ['bash']: write the tool's name and the name of its"),
        ("", "env = { A = 1 }", "", "runs.chat.env.A is 1: write a string"),
        ("", 'files = { "/etc/x" = "" }', "", "runs.chat.files./etc/x is '': the key is a path in the harness's home"),
        ("", 'files = { "a/../../x" = "" }', "", "runs.chat.files.a/../../x is ''"),
        ("", "", 'dialect = "openai_chat"', "runs.chat.dialect is missing"),
        ('[runs.b]\nhost = "a"\ndialect = "telepathy"\ncommand = ["{task}"]', "", "", "runs.b.dialect is 'telepathy'"),
        ('[runs.b]\nhost = "a"\ndialect = "gemini"\ncommand = ["x"]', "", "", "runs.b.command is ['x']: put {task}"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_by_name(write: Write, before: str, after: str, without: str, sentence: str):
    """The refusal names the file, the field, the value and the remedy."""
    folder = write(before, after, without=without)
    with pytest.raises(Refusal) as refused:
        recipe.load(folder)
    assert str(refused.value).startswith(f"{folder / 'harness.toml'}: {sentence}")


def test_what_is_no_toml_is_refused_with_its_place(tmp_path: Path):
    """Line and column are in the sentence."""
    (tmp_path / "harness.toml").write_text("name =\n")
    with pytest.raises(Refusal, match="line 1"):
        recipe.load(tmp_path)


def test_the_instruction_is_put_in_every_place_as_it_is():
    """In words, variables and standard input; what looks like a place in the instruction itself is left alone."""
    way = Way("w", "h", "gemini", ("agent", "-p={task}"), env={"T": "{task}"}, stdin="{task}\n")
    command = command_of(way, "say {command} 'é'")
    assert command == Command(
        ("agent", "-p=say {command} 'é'"), {"T": "say {command} 'é'"}, stdin="say {command} 'é'\n".encode()
    )


def test_the_users_own_command_is_told_the_instruction_in_three_ways():
    """Quoted in the command line, in POLAR_TASK, and on standard input."""
    command = command_of(recipe.find("shell").way(), "it's; rm x", "agent --do {task}")
    assert command.argv == ("sh", "-c", "agent --do 'it'\"'\"'s; rm x'")
    assert command.env == {"POLAR_TASK": "it's; rm x"}
    assert command.stdin == b"it's; rm x"


def test_a_command_is_wanted_by_the_harness_shell_and_by_no_other():
    """A command that would be ignored is refused, as is its absence."""
    with pytest.raises(Refusal, match="needs to be told what to run: --command"):
        command_of(recipe.find("shell").way(), "x")
    with pytest.raises(Refusal, match="--command 'agent' is for the harness `shell`"):
        command_of(recipe.find("pi").way(), "x", "agent")
