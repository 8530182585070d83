"""The command without its extra."""

import subprocess
import sys

import pytest

BLOCKED = (
    "import sys; sys.modules[{!r}] = None; sys.argv = ['polar-train', *{!r}]; import polar_train.entry as e; e.main()"
)


@pytest.mark.parametrize(
    ("module", "arguments"), [("typer", ["--help"]), ("torch", ["step", "b", "--model", "m", "--out", "o"])]
)
def test_a_missing_module_is_one_sentence_that_names_the_extra(module, arguments, tmp_path):
    """Whether it is missed at once or by the command that needs it: exit code 1 and no traceback."""
    command = [sys.executable, "-c", BLOCKED.format(module, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr == f"polar-train needs the module '{module}': pip install 'polar-mitm[train]'\n"


def test_help_lists_the_commands():
    """With the extra, help works and takes no torch."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format("torch", ["--help"])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("step", "push", "engine", "fetch"))
