"""The commands `polar-toolkit harness ...`, as they are typed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polar_toolkit.cli import app
from polar_toolkit.rollout import recipe


def typed(*words: str) -> Result:
    return CliRunner().invoke(app, ["harness", *words])


def test_the_list_names_every_harness_and_marks_its_default_way():
    """Eight of them, each with its version."""
    shown = typed("list").stdout
    for name in recipe.names():
        assert name in shown
        assert recipe.find(name).version in shown
    assert "(default)" in shown


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["check", "pii"], "no harness is called 'pii'"),
        (["check", "pi", "--way", "x"], "harness 'pi' has no way 'x'"),
        (["check", "shell"], "needs to be told what to run: --command"),
        (["check", "pi", "--command", "x"], "this one has a command of its own"),
        (["check", "pi", "--sandbox", "x"], "no sandbox is called 'x'"),
        (["build", "pii"], "no harness is called 'pii'"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(words: list[str], sentence: str):
    """Exit code 2, before anything is started."""
    done = typed(*words)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_a_run_folder_that_exists_is_not_overwritten(tmp_path: Path):
    """The refusal names it."""
    done = typed("check", "pi", "--run", str(tmp_path))
    assert done.exit_code == 2
    assert f"{tmp_path} exists" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.harness
def test_a_check_that_misses_something_ends_with_1_and_says_where_to_look(tmp_path: Path):
    """The table is on standard output, the folder with the logs on standard error."""
    run = tmp_path / "run"
    done = typed("check", "shell", "--command", "true", "--sandbox", "process", "--run", str(run))
    assert done.exit_code == 1
    assert "not printed" in done.stdout
    assert str(run) in done.stderr
    assert (run / "logs" / "harness.err").exists()
