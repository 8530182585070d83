"""How a command says no."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import typer

from polar_toolkit.errors import Refusal
from polar_toolkit.refusing import refusing


def refuse() -> None:
    raise Refusal("the file is torn")


def ask_for(module: str) -> None:
    importlib.import_module(module)


def test_a_refusal_is_one_sentence_and_exit_code_2(capsys: pytest.CaptureFixture[str]):
    """No traceback, and nothing on standard output."""
    with pytest.raises(typer.Exit) as ended:
        refusing(refuse)()
    assert ended.value.exit_code == 2
    assert capsys.readouterr() == ("", "polar-toolkit: the file is torn\n")


def test_a_missing_module_names_the_extra_that_brings_it(capsys: pytest.CaptureFixture[str]):
    """The sentence is the line to type."""
    with pytest.raises(typer.Exit) as ended:
        refusing(partial(ask_for, "no_such_module"), extra="rollout")()
    assert ended.value.exit_code == 2
    assert "needs the module 'no_such_module': pip install 'polar-mitm[rollout]'" in capsys.readouterr().err


def test_a_missing_module_of_ours_is_a_fault():
    """It keeps its traceback."""
    with pytest.raises(ModuleNotFoundError):
        refusing(partial(ask_for, "polar_toolkit.no_such_module"))()
