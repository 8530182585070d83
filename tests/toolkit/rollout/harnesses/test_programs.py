"""What has to be mounted for a program of the host to run in a sandbox at the same path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.harnesses.programs import Found, find
from polar_toolkit.rollout.sandbox import USUAL_PATH as USUAL
from polar_toolkit.rollout.sandbox import Mount

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write an executable file; gives its path."""

    def written(path: str, text: str = "\x7fELF") -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
        return file

    return written


def link(path: Path, target: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


def own(*folders: Path) -> set[Mount]:
    """Mounts at the folders' own paths."""
    return {Mount(folder, str(folder)) for folder in folders}


def found(program: str, *folders: Path) -> Found:
    return find([program], ":".join(map(str, folders)))


def test_a_program_under_usr_needs_nothing():
    """A sandbox has a /usr: the host's or its image's."""
    assert find(["sh"], USUAL) == Found((), USUAL)


def test_a_plain_program_brings_its_folder(write: Write):
    """It is found inside by the folder's own path, before those of the system."""
    agent = write("tools/agent")
    seen = found("agent", agent.parent)
    assert set(seen.mounts) == own(agent.parent)
    assert seen.path == f"{agent.parent}:{USUAL}"


def test_an_npm_package_brings_all_packages_and_its_node(write: Write, tmp_path: Path):
    """The topmost node_modules holds the package and what it needs, and .bin, and here Node, too."""
    modules = tmp_path / "app" / "node_modules"
    write("app/node_modules/agent/node_modules/inner/cli.js", "#!/usr/bin/env node\n")
    write("app/node_modules/node-linux/bin/node")
    link(modules / ".bin" / "node", "../node-linux/bin/node")
    link(modules / ".bin" / "agent", "../agent/node_modules/inner/cli.js")
    seen = found("agent", modules / ".bin")
    assert set(seen.mounts) == own(modules)
    assert seen.path == f"{modules / '.bin'}:{USUAL}"


def test_a_script_brings_the_interpreter_that_stands_elsewhere_on_path(write: Write):
    """`env` finds it inside as it does outside."""
    agent = write("tools/agent", "#!/usr/bin/env -S X=1 node --no-warnings\n")
    node = write("node24/bin/node")
    seen = found("agent", agent.parent, node.parent)
    assert set(seen.mounts) == own(agent.parent, node.parent)
    assert seen.path == f"{agent.parent}:{node.parent}:{USUAL}"


def test_an_interpreter_named_by_its_path_comes_along_and_is_not_put_on_path(write: Write):
    """Nothing but the script itself asks for it."""
    interpreter = write("interpreters/own")
    agent = write("tools/agent", f"#!{interpreter} -x\n")
    seen = found("agent", agent.parent)
    assert set(seen.mounts) == own(agent.parent, interpreter.parent)
    assert seen.path == f"{agent.parent}:{USUAL}"


def test_a_virtual_environment_brings_its_base_and_comes_last_on_path(write: Write, tmp_path: Path):
    """Its own `python` must not take the place of the one that a task means."""
    base = write("pythons/3.13/bin/python3").parents[1]
    (base / "lib" / "python3.13").mkdir(parents=True)
    python = link(tmp_path / "venv" / "bin" / "python", str(base / "bin" / "python3"))
    write("venv/bin/agent", f"#!{python}\n")
    write("venv/pyvenv.cfg", f"home = {base / 'bin'}\nversion = 3.13.0\n")
    seen = found("agent", python.parent)
    assert set(seen.mounts) == own(tmp_path / "venv", base)
    assert seen.path == f"{USUAL}:{python.parent}"


def test_every_link_on_the_way_exists_inside(write: Write, tmp_path: Path):
    """A folder that is itself a link is mounted at both of its names."""
    real = write("versions/1.2/agent").parent
    current = link(tmp_path / "current", "versions/1.2")
    entry = link(tmp_path / "bin" / "agent", str(current / "agent"))
    assert set(found("agent", entry.parent).mounts) == {*own(entry.parent, real), Mount(real, str(current))}


def test_a_program_that_is_missing_is_refused_by_name(tmp_path: Path):
    """The sentence names the program and where it was looked for."""
    with pytest.raises(Refusal, match=f"no program 'agent' on PATH \\({tmp_path}\\): install it"):
        found("agent", tmp_path)


def test_a_home_folder_is_never_mounted(write: Write, monkeypatch: pytest.MonkeyPatch):
    """A program that lies directly in it would show the user's files to the harness."""
    agent = write("agent")
    monkeypatch.setenv("HOME", str(agent.parent))
    with pytest.raises(Refusal, match="into a folder of its own"):
        found("agent", agent.parent)


def test_a_shim_is_refused_with_the_remedy(write: Write):
    """It only calls a version manager, which the sandbox has not."""
    shim = write("pyenv/shims/agent", "#!/bin/sh\n")
    with pytest.raises(Refusal, match="version manager"):
        found("agent", shim.parent)


def test_an_environment_without_its_python_is_refused(tmp_path: Path, write: Write):
    """The sentence names the folder that its pyvenv.cfg promises."""
    write("venv/pyvenv.cfg", "home = /nowhere\n")
    write("venv/bin/agent")
    with pytest.raises(Refusal, match="'/nowhere', where no Python lies"):
        found("agent", tmp_path / "venv" / "bin")
