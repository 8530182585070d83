"""Copies of what a harness wrote are harmless, and its folders can always be removed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from polar_toolkit.rollout.sandbox.folders import copy, inside, remove

MB = 1 << 20
SHUT = """
import os, sys
from pathlib import Path
from polar_toolkit.rollout.sandbox.folders import copy, remove
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
box = Path(sys.argv[1])
inner = box / "shut" / "a" / "b"
inner.mkdir(parents=True)
(inner / "f").write_text("work")
(inner / "f").chmod(0)
inner.chmod(0o400)
inner.parent.chmod(0o100)
copy(box / "shut", box / "copy")
(box / "shut" / "a" / "b").chmod(0)
remove(box / "shut")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


def test_the_contents_of_a_folder_are_copied(source: Path, tmp_path: Path):
    """Files, folders and modes arrive; what was there already stays."""
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "run.sh").write_text("echo hello\n")
    (source / "a" / "b" / "run.sh").chmod(0o755)
    target = tmp_path / "target"
    target.mkdir()
    (target / "before").write_text("kept")
    copy(source, target)
    assert (target / "a" / "b" / "run.sh").read_text() == "echo hello\n"
    assert stat.S_IMODE((target / "a" / "b" / "run.sh").stat().st_mode) == 0o755
    assert (target / "before").read_text() == "kept"


def test_a_single_file_is_copied_to_a_path(source: Path, tmp_path: Path):
    """The folders above the target are made."""
    (source / "one").write_text("1")
    copy(source / "one", tmp_path / "new" / "uno")
    assert (tmp_path / "new" / "uno").read_text() == "1"


def test_links_stay_links(source: Path, tmp_path: Path):
    """A link is copied as a link, wherever it leads, and one in the target's place is replaced, not followed."""
    (tmp_path / "secret").write_text("of the host")
    (source / "away").symlink_to(tmp_path / "secret")
    (source / "plain").write_text("new")
    target = tmp_path / "target"
    target.mkdir()
    (target / "plain").symlink_to(tmp_path / "secret")
    copy(source, target)
    assert (target / "away").readlink() == tmp_path / "secret"
    assert (target / "plain").read_text() == "new"
    assert not (target / "plain").is_symlink()
    assert (tmp_path / "secret").read_text() == "of the host"


def test_pipes_and_sockets_are_left_out(source: Path, tmp_path: Path):
    """A named pipe, which would keep a reader for ever, is not copied."""
    os.mkfifo(source / "pipe")
    (source / "file").write_text("")
    copy(source, tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["file"]


def test_no_copy_is_privileged(source: Path, tmp_path: Path):
    """The set-user-id bit of a file that the sandbox's user made does not reach the host's copy."""
    (source / "shell").write_text("")
    (source / "shell").chmod(0o4755)
    copy(source, tmp_path / "target")
    assert stat.S_IMODE((tmp_path / "target" / "shell").stat().st_mode) == 0o755


def test_holes_stay_holes(source: Path, tmp_path: Path):
    """A file of a terabyte that takes nothing on the disk takes nothing in the copy, and its data is where it was."""
    with (source / "sparse").open("wb") as file:
        file.write(b"begin")
        file.seek(MB << 20)
        file.write(b"end")
    copy(source, tmp_path / "target")
    copied = tmp_path / "target" / "sparse"
    assert copied.stat().st_size == (MB << 20) + 3
    assert copied.stat().st_blocks * 512 < MB
    with copied.open("rb") as file:
        assert file.read(5) == b"begin"
        file.seek(MB << 20)
        assert file.read() == b"end"


def test_many_names_of_one_file_stay_one_file(source: Path, tmp_path: Path):
    """Hard links do not multiply what a copy takes."""
    (source / "a").write_bytes(os.urandom(MB))
    (source / "b").hardlink_to(source / "a")
    copy(source, tmp_path / "target")
    assert (tmp_path / "target" / "a").samefile(tmp_path / "target" / "b")


def test_what_a_harness_shut_is_copied_and_removed_by_its_owner(tmp_path: Path):
    """Modes that forbid do not hide work, and do not keep anything from being removed (as an unprivileged user)."""
    box = tmp_path / "box"
    box.mkdir()
    for above in (tmp_path, *tmp_path.parents[:2]):
        above.chmod(0o755)
    box.chmod(0o777)
    done = subprocess.run([sys.executable, "-c", SHUT, str(box)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (box / "copy" / "a" / "b" / "f").read_text() == "work"
    assert not (box / "shut").exists()


def test_a_folder_deeper_than_any_path_is_copied_as_far_as_paths_go_and_removed(source: Path, tmp_path: Path):
    """Five thousand folders one in the other neither stop a copy nor stay behind."""
    script = 'import os\nfor _ in range(5000): os.mkdir("d"); os.chdir("d")'
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True)
    copy(source, tmp_path / "target")
    assert (tmp_path / "target" / "d" / "d").is_dir()
    remove(source)
    remove(tmp_path / "target")
    assert not any(tmp_path.iterdir())


def test_a_path_through_a_link_is_not_inside(tmp_path: Path):
    """What is named below a folder, but lies elsewhere, is refused; a link at the end itself is not followed."""
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "out").symlink_to("/etc")
    assert inside(tmp_path / "box", tmp_path / "box" / "out") == tmp_path / "box" / "out"
    with pytest.raises(ValueError, match="leads out of"):
        inside(tmp_path / "box", tmp_path / "box" / "out" / "passwd")


def test_removing_what_is_not_there_is_no_error(tmp_path: Path):
    """It may be removed twice."""
    remove(tmp_path / "gone")
