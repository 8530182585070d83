"""Where a program of the host really lies, and what else it needs in order to run in a sandbox at the same path.

Invariant: what is mounted is read-only and named: an installation, never a home folder or a root of the host. Nothing
under /usr is mounted: a sandbox has a /usr of its own or the host's. It starts no program, and looks for no libraries
but those that lie in an installation of a known form: npm's, a Python's, a virtual environment.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.recipe import Recipe
from polar_toolkit.rollout.sandbox import USUAL_PATH, Mount

_SHEBANG_BYTES = 512
_MOST_LINKS = 40
_HOME = re.compile(r"^home\s*=\s*(.*?)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Found:
    """What a sandbox needs for some programs."""

    mounts: tuple[Mount, ...]
    path: str
    """PATH inside. Folders of virtual environments come last: their `python` is not the one that a task means."""


@dataclass(slots=True)
class _Search:
    path: str
    folders: dict[Path, None] = field(default_factory=dict[Path, None])
    """Mounted at their own path, in the order in which they were found."""
    first: dict[str, None] = field(default_factory=dict[str, None])
    last: dict[str, None] = field(default_factory=dict[str, None])
    seen: set[Path] = field(default_factory=set[Path])


def needed(recipe: Recipe) -> Found:
    """What a harness's programs need: they are looked for in its own folder first, then on this process's PATH."""
    path = os.pathsep.join([str(recipe.folder.resolve()), os.environ.get("PATH", os.defpath)])
    return find(recipe.programs, path)


def find(programs: Sequence[str], path: str) -> Found:
    """What the programs, looked for on the host's `path`, need inside.

    Raises Refusal for a program that is not there, or that lies where mounting it would show the user's own files.
    """
    search = _Search(path)
    for program in programs:
        _follow(search, _look_up(program, path))
    inside = ":".join([*search.first, USUAL_PATH, *search.last])
    return Found(tuple(_mounts(search.folders)), inside)


def _look_up(program: str, path: str) -> Path:
    found = shutil.which(program, path=path)
    if found is None:
        raise Refusal(f"no program {program!r} on PATH ({path}): install it, or add its folder to PATH")
    entry = Path(os.path.normpath(Path(found).absolute()))
    if entry.parent.name == "shims":
        raise Refusal(
            f"{entry} only passes on to a version manager, which is not inside the sandbox: "
            f"put the folder of the {program!r} that it starts on PATH before it"
        )
    return entry


def _follow(search: _Search, entry: Path, *, on_path: bool = True) -> None:
    """Take in a program, the links to it, the installation around it, and what interprets it."""
    if entry in search.seen:
        return
    search.seen.add(entry)
    steps = list(_links(entry))
    real = entry.resolve()
    installation = _installation(real) or _installation(steps[-1])
    for folder in [*(step.parent for step in steps), installation or real.parent]:
        _take(search, folder, entry)
    if environment := _environment(steps):
        _take(search, environment, entry)
        _follow(search, _base_python(environment), on_path=False)
    if on_path and not _ours_already(entry.parent):
        (search.last if environment else search.first).setdefault(str(entry.parent))
    if interpreter := _shebang(real):
        by_name = "/" not in interpreter
        _follow(search, _look_up(interpreter, search.path) if by_name else Path(interpreter), on_path=by_name)


def _links(entry: Path) -> Iterator[Path]:
    """The entry, and each further link on the way to the file, as they are spelled: they have to exist inside, too."""
    for _ in range(_MOST_LINKS):
        yield entry
        if not entry.is_symlink():
            return
        entry = Path(os.path.normpath(entry.parent.resolve() / entry.readlink()))
    raise Refusal(f"{entry} is a link that leads to itself: install the program anew")


def _installation(file: Path) -> Path | None:
    """The folder that holds all of npm's packages around a file, or the prefix of a Python."""
    if "node_modules" in file.parts:
        return Path(*file.parts[: file.parts.index("node_modules") + 1])
    is_python = file.parent.name == "bin" and any((file.parents[1] / "lib").glob("python3*"))
    return file.parents[1] if is_python and file.name.startswith("python") else None


def _environment(steps: Sequence[Path]) -> Path | None:
    """The virtual environment in whose folder of programs one of the steps lies."""
    return next((step.parents[1] for step in steps if (step.parent.parent / "pyvenv.cfg").is_file()), None)


def _base_python(environment: Path) -> Path:
    config = environment / "pyvenv.cfg"
    found = _HOME.search(config.read_text())
    home = Path(found[1]) if found else environment
    base = next((path for name in ("python3", "python") if (path := home / name).exists()), None)
    if base is None:
        raise Refusal(f"{config}: home is {str(home)!r}, where no Python lies: make the environment {environment} anew")
    return base


def _shebang(file: Path) -> str:
    """The interpreter of a script: a path, or a name that is looked up on PATH; "" where it is no script."""
    with file.open("rb") as opened:
        start = opened.read(_SHEBANG_BYTES)
    if not start.startswith(b"#!"):
        return ""
    words = start[2:].partition(b"\n")[0].decode(errors="replace").split()
    if not words or Path(words[0]).name != "env":
        return words[0] if words else ""
    return next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")


def _take(search: _Search, folder: Path, entry: Path) -> None:
    """Mount a folder, unless it is the sandbox's own anyhow. Raises Refusal for one that holds more than programs."""
    if _ours_already(folder):
        return
    home = Path.home()
    if folder.resolve() in (home.resolve(), *home.resolve().parents):
        raise Refusal(f"{entry} needs all of {folder} inside the sandbox: move the program into a folder of its own")
    search.folders.setdefault(folder)


def _ours_already(folder: Path) -> bool:
    return folder.resolve().is_relative_to("/usr")


def _mounts(folders: dict[Path, None]) -> Iterator[Mount]:
    """Each at its own path, without those that lie in another one."""
    for folder in folders:
        if not any(folder != other and folder.is_relative_to(other) for other in folders):
            yield Mount(folder.resolve(), str(folder))
