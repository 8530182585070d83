"""The wheel that people install: what is in it, and what its commands say with and without their extras.

Slow, because a clean environment is filled from the package index (or the installer's cache).
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UV = Path(sys.executable).parent / "uv"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from the working tree."""
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--installer", "uv", "--outdir", str(out), str(ROOT))
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs' folder of a clean environment that holds the wheel without extras."""
    return _environment(tmp_path_factory.mktemp("bare"), str(wheel))


@pytest.fixture(scope="module")
def with_toolkit(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs' folder of a clean environment that holds the wheel with the toolkit extra."""
    return _environment(tmp_path_factory.mktemp("toolkit"), f"{wheel}[toolkit]")


def test_the_wheel_claims_exactly_three_names(wheel: Path) -> None:
    """Top-level names are polar_mitm, polar_toolkit and polar_train: nothing generic that could collide."""
    names = {Path(name).parts[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"polar_mitm", "polar_toolkit", "polar_train"}


def test_the_interceptor_needs_no_extra(bare: Path) -> None:
    """The addon can be imported from the wheel alone."""
    _run(str(bare / "python"), "-c", "import polar_mitm.addon")


def test_the_toolkit_command_works_with_its_extra(with_toolkit: Path) -> None:
    """`polar-toolkit --help` lists its commands."""
    assert "merge" in _run(str(with_toolkit / "polar-toolkit"), "--help").stdout


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["polar-toolkit", "merge", "nowhere"], "toolkit"),
        (["polar-train", "step", "nowhere", "--model", "nowhere", "--out", "nowhere"], "train"),
    ],
    ids=["toolkit", "train"],
)
def test_a_missing_extra_is_named_in_one_sentence(bare: Path, command: list[str], extra: str) -> None:
    """Without its extra a command fails with one line that says what to install."""
    done = subprocess.run([bare / command[0], *command[1:]], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip()
    assert done.returncode != 0
    assert f"polar-mitm[{extra}]" in said
    assert len(said.splitlines()) == 1


def _environment(folder: Path, requirement: str) -> Path:
    _run(str(UV), "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
    programs = folder / "venv" / "bin"
    where = ["--quiet", "--python", str(programs / "python"), "-c", str(ROOT / "constraints.txt")]
    _run(str(UV), "pip", "install", *where, requirement)
    return programs


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}"
    return done
