"""The installed command."""

import subprocess
import sys

_WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from polar_toolkit.entry import main
main()
"""


def run_without(name):
    return subprocess.run([sys.executable, "-c", _WITHOUT.format(name=name)], capture_output=True, text=True)


def test_a_missing_library_gives_one_sentence_that_names_the_extra():
    """No traceback: what to install."""
    done = run_without("typer")
    assert done.returncode == 1
    assert done.stderr == "polar-toolkit needs the module 'typer': pip install 'polar-mitm[toolkit]'\n"


def test_a_missing_module_of_our_own_is_a_traceback():
    """That is a broken installation, not a missing extra."""
    assert "Traceback" in run_without("polar_toolkit.stats").stderr


def test_help_is_printed():
    """The command line imports, and lists its commands."""
    program = "import sys; sys.argv = ['polar-toolkit', '--help']; from polar_toolkit.entry import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for command in ("env", "merge", "reward", "batch", "stats", "inspect", "rescore", "doctor"):
        assert command in done.stdout
