"""What bubblewrap is told. That it holds: test_local_isolation.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox import Mount
from polar_toolkit.rollout.sandbox.bubblewrap import OWN_ETC, Scene, arguments, python


def scene(*, as_root: bool = False) -> Scene:
    return Scene(
        etc=Path("/run-folder/etc"),
        folders={"/tests/more": Path("/run-folder/b"), "/tests": Path("/run-folder/a")},
        files=[Mount(Path("/opt/node"), "/opt/node")],
        as_root=as_root,
    )


def binds(words: list[str]) -> list[tuple[str, str, str]]:
    return [(word, *words[at + 1 : at + 3]) for at, word in enumerate(words) if word in ("--bind", "--ro-bind")]


@pytest.mark.parametrize("as_root", [True, False])
def test_only_the_sandboxs_folders_are_bound_for_writing(as_root: bool):  # noqa: FBT001  # a parameter of pytest
    """The outer ones first, so that what lies within is seen; everything else is read-only, the root, too."""
    words = arguments(scene(as_root=as_root))
    assert [bind for bind in binds(words) if bind[0] == "--bind"] == [
        ("--bind", "/run-folder/a", "/tests"),
        ("--bind", "/run-folder/b", "/tests/more"),
    ]
    assert words[-4:-2] == ["--remount-ro", "/"]
    assert "/etc" not in [source for _, source, _ in binds(words)]
    assert {target for _, _, target in binds(words) if target.startswith("/etc/")} == {
        f"/etc/{name}" for name in OWN_ETC
    }


def test_a_program_within_a_folder_of_the_sandbox_is_seen():
    """It is bound after the folder, and the folders around it are made in that one, open to everybody."""
    tmp = Scene(
        Path("/etc-files"), {"/tmp": Path("/run-folder/tmp")}, [Mount(Path("/tmp/a/b"), "/tmp/a/b")], as_root=True
    )
    words = arguments(tmp)
    around = next(at for at, word in enumerate(words) if word == "--dir" and words[at + 1] == "/tmp/a")
    places = [words.index("/run-folder/tmp"), around, words.index("/tmp/a/b")]
    assert places == sorted(places)
    assert words[around - 2 : around] == ["--perms", "0755"]


def test_a_user_needs_a_user_namespace_and_root_does_not():
    """Each begins with the few capabilities that it needs to give them all up."""
    user, root = arguments(scene()), arguments(scene(as_root=True))
    assert "--unshare-user" in user
    assert "--unshare-user" not in root
    added = [words[at + 1] for words in (user, root) for at, word in enumerate(words) if word == "--cap-add"]
    assert "CAP_SETFCAP" in added
    assert "CAP_DAC_OVERRIDE" not in added


def test_nothing_is_kept_of_the_environment_and_of_the_terminal():
    """Nor of any namespace; and it all ends with its parent."""
    assert {
        "--clearenv", "--new-session", "--die-with-parent", "--unshare-net", "--unshare-pid", "--unshare-ipc",
        "--unshare-uts",
    } <= set(arguments(scene()))  # fmt: skip


def test_a_python_is_found():
    """The machine's own; it exists."""
    assert Path(python()[0]).exists()
