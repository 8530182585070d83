"""The folder tells whose format it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.tasks import folders


def write(folder: Path, toml: str, instruction: str | None = "Do it.\n") -> Path:
    """A task's folder with a Harbor test script."""
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text("true\n")
    (folder / "task.toml").write_text(toml)
    if instruction is not None:
        (folder / "instruction.md").write_text(instruction)
    return folder


def test_a_check_makes_it_ours(tmp_path: Path) -> None:
    """Without one it is Harbor's."""
    assert folders.read(write(tmp_path / "a", '[check]\nkind = "command"\n')).metadata["format"] == "folder"
    assert folders.read(write(tmp_path / "b", "[metadata]\n")).metadata["format"] == "harbor"


@pytest.mark.parametrize(
    ("toml", "instruction", "said"),
    [
        ("[check", "Do.", "cannot be read"),
        ("[metadata]\n", None, "instruction.md beside it cannot be read"),
        ("[metadata]\n", " \n", "instruction.md is empty"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(toml: str, instruction: str | None, said: str, tmp_path: Path) -> None:
    """With the file."""
    with pytest.raises(Refusal, match=said):
        folders.read(write(tmp_path / "a", toml, instruction))
