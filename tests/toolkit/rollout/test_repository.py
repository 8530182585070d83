"""What the scripts do to a repository, run in its folder by a shell."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout import repository
from tests.toolkit.rollout.repositories import ANSWER, BROKEN, CORRECT, Made, git, make


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """A repository as a task brings it, at its newest commit."""
    return make(tmp_path / "repository")


@pytest.fixture
def cut(made: Made) -> Made:
    """The same, set back to its base."""
    sh(made.folder, repository.cut_history(made.base))
    return made


def sh(folder: Path, script: str) -> bytes:
    """What a script prints."""
    done = subprocess.run(["sh", "-c", script], cwd=folder, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def objects(folder: Path) -> str:
    """Every object that the repository has, by type and contents."""
    names = git(folder, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    return "".join(git(folder, "cat-file", "-p", name) for name in names)


def carried(made: Made, tmp_path: Path) -> Path:
    """The work of a repository, as a patch, in a second one that is at the base."""
    patch = tmp_path / "patch"
    patch.write_bytes(sh(made.folder, repository.difference(made.base)))
    other = make(tmp_path / "other")
    sh(other.folder, repository.cut_history(other.base))
    sh(other.folder, repository.apply(str(patch)))
    return other.folder


def test_no_object_tells_of_what_came_later(cut: Made) -> None:
    """Neither loose nor packed, reachable or not: the answer was there, and is gone."""
    assert ANSWER not in objects(cut.folder)
    assert "base" in objects(cut.folder)


def test_every_name_leads_to_the_base(cut: Made) -> None:
    """Branches, tags, notes, stash and remotes go; what is left is a branch at the base."""
    assert cut.git("for-each-ref", "--format=%(refname) %(objectname)").split() == ["refs/heads/main", cut.base]
    assert cut.git("rev-list", "--all", "--count").strip() == "1"
    assert cut.git("remote") == ""
    assert "example.com" not in (cut.folder / ".git" / "config").read_text()


def test_no_file_of_git_tells_of_what_came_later(cut: Made) -> None:
    """Reflogs, FETCH_HEAD, ORIG_HEAD, hooks, notes and messages are files, too."""
    left = {path.name for path in (cut.folder / ".git").iterdir()}
    assert left <= {"HEAD", "config", "description", "index", "info", "objects", "refs", "packed-refs"}


def test_the_work_tree_is_at_the_base(cut: Made) -> None:
    """Files that came later are gone, git sees no change, and no hook of the repository was run."""
    assert (cut.folder / "stats.py").read_text() == BROKEN
    assert not (cut.folder / "later.py").exists()
    assert not (cut.folder / "hooked").exists()
    assert cut.git("status", "--porcelain") == ""


def test_files_that_git_does_not_know_stay(made: Made) -> None:
    """What was built stays: it is what INIT took the time for."""
    (made.folder / "build").mkdir()
    (made.folder / "build" / "library.so").write_text("built")
    sh(made.folder, repository.cut_history(made.base))
    assert (made.folder / "build" / "library.so").exists()


def test_borrowed_objects_become_its_own(made: Made, tmp_path: Path) -> None:
    """A repository that borrows from another one has what the base needs, and can reach the other no more."""
    git(tmp_path, "clone", "-q", "--shared", str(made.folder), "borrower")
    sh(tmp_path / "borrower", repository.cut_history(made.base))
    assert not (tmp_path / "borrower" / ".git" / "objects" / "info" / "alternates").exists()
    assert ANSWER not in objects(tmp_path / "borrower")


def test_packs_that_are_to_be_kept_are_not(made: Made) -> None:
    """A .keep file beside a pack would hold the later history."""
    (pack,) = (made.folder / ".git" / "objects" / "pack").glob("*.pack")
    pack.with_suffix(".keep").touch()
    sh(made.folder, repository.cut_history(made.base))
    assert ANSWER not in objects(made.folder)


def test_what_is_no_commit_is_refused() -> None:
    """A name could be moved by the harness; a hash cannot."""
    with pytest.raises(Refusal, match=r"base_commit is 'HEAD; id': give the hash"):
        repository.cut_history("HEAD; id")


def test_a_repository_without_the_commit_fails(made: Made) -> None:
    """And says which commit, and changes nothing."""
    done = subprocess.run(
        ["sh", "-c", repository.cut_history("0" * 40)], cwd=made.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "has no commit 0000000" in done.stderr
    assert ANSWER in objects(made.folder)


def test_all_of_the_work_is_carried(cut: Made, tmp_path: Path) -> None:
    """Changed, new, binary, deleted and executable files, links, blanks in names, and commits."""
    folder = cut.folder
    (folder / "stats.py").write_text(CORRECT)
    cut.git("commit", "-q", "-a", "-m", "work")
    (folder / "new file.bin").write_bytes(bytes(range(256)))
    (folder / ".gitignore").unlink()
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("stats.py")
    other = carried(cut, tmp_path)
    assert (other / "stats.py").read_text() == CORRECT
    assert (other / "new file.bin").read_bytes() == bytes(range(256))
    assert not (other / ".gitignore").exists()
    assert (other / "run.sh").stat().st_mode & 0o111
    assert (other / "link").readlink() == Path("stats.py")


def test_no_work_is_an_empty_patch(cut: Made, tmp_path: Path) -> None:
    """And an empty patch is applied."""
    assert sh(cut.folder, repository.difference(cut.base)) == b""
    assert (carried(cut, tmp_path) / "stats.py").read_text() == BROKEN


def test_a_file_that_lies_in_the_way_is_replaced(cut: Made, tmp_path: Path) -> None:
    """What the preparation made in both sandboxes, and git does not know, comes with the patch as well."""
    (cut.folder / "made.txt").write_text("changed by the harness")
    patch = tmp_path / "patch"
    patch.write_bytes(sh(cut.folder, repository.difference(cut.base)))
    (cut.folder / "made.txt").write_text("as prepared")
    sh(cut.folder, repository.apply(str(patch)))
    assert (cut.folder / "made.txt").read_text() == "changed by the harness"


def test_compiled_files_and_what_the_base_ignores_are_not_carried(cut: Made) -> None:
    """A __pycache__ could stand for the source beside it."""
    for name in ("build/x", "__pycache__/stats.cpython-311.pyc", "deep/down/x.pyc"):
        (cut.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (cut.folder / name).write_text("x")
    assert sh(cut.folder, repository.difference(cut.base)) == b""


def test_the_harness_cannot_hide_a_file_by_ignoring_it(cut: Made) -> None:
    """Neither by .gitignore, by .git/info/exclude, nor by marks in the index."""
    (cut.folder / ".git" / "info").mkdir(exist_ok=True)
    (cut.folder / ".git" / "info" / "exclude").write_text("*\n")
    (cut.folder / "deep").mkdir()
    (cut.folder / "deep" / ".gitignore").write_text("*\n")
    (cut.folder / "deep" / "hidden.py").write_text("HIDDEN = 1\n")
    cut.git("update-index", "--skip-worktree", "stats.py")
    (cut.folder / "stats.py").write_text(CORRECT)
    patch = sh(cut.folder, repository.difference(cut.base)).decode()
    assert "HIDDEN" in patch
    assert ANSWER in patch


def test_no_program_that_the_repository_names_is_run(cut: Made) -> None:
    """External differs, filters, text conversion, monitors, hooks and pagers of its configuration are not obeyed."""
    trap = "touch trapped; cat"
    for name in ("core.fsmonitor", "diff.external", "core.pager", "diff.evil.textconv", "filter.evil.clean",
                 "filter.evil.smudge", "diff.evil.command"):  # fmt: skip
        cut.git("config", name, trap)
    (cut.folder / ".gitattributes").write_text("* filter=evil diff=evil\n")
    hooks = cut.folder / ".git" / "hooks"
    hooks.mkdir()
    for name in ("post-index-change", "reference-transaction", "pre-commit"):
        (hooks / name).write_text(f"#!/bin/sh\n{trap}\n")
        (hooks / name).chmod(0o755)
    (cut.folder / "stats.py").write_text(CORRECT)
    patch = sh(cut.folder, repository.difference(cut.base)).decode()
    assert f"+    return sorted(numbers)[{ANSWER}]" in patch
    assert not (cut.folder / "trapped").exists()


def test_a_replaced_base_does_not_change_the_difference(cut: Made) -> None:
    """A replacement of the base commit by another is not followed."""
    (cut.folder / "stats.py").write_text(CORRECT)
    cut.git("commit", "-q", "-a", "-m", "work")
    cut.git("replace", cut.base, "HEAD")
    assert ANSWER in sh(cut.folder, repository.difference(cut.base)).decode()
