"""A small git repository whose later history holds the answer, in every place where git keeps something."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

BROKEN = "def median(numbers):\n    return sorted(numbers)[0]\n"
CORRECT = "def median(numbers):\n    return sorted(numbers)[len(numbers) // 2]\n"
OLD_TESTS = "from stats import median\n\n\ndef test_one():\n    assert median([4]) == 4\n"
NEW_TESTS = f"{OLD_TESTS}\n\ndef test_three():\n    assert median([9, 1, 5]) == 5\n"
ANSWER = "len(numbers) // 2"
_WHO = {
    "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.com", "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.com", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """A repository."""

    folder: Path
    base: str
    """The commit at which the harness begins."""
    test_patch: str
    """From the base's tests to those that judge."""

    def git(self, *words: str) -> str:
        """What a git command prints."""
        return git(self.folder, *words)


def git(folder: Path, *words: str) -> str:
    """What a git command in a folder prints. Raises CalledProcessError."""
    done = subprocess.run(
        ["git", *words], cwd=folder, env=os.environ | _WHO, capture_output=True, text=True, check=True
    )
    return done.stdout


def make(folder: Path) -> Made:
    """Base commit, then the answer: on the branch, a tag, a note, a stash, a remote, a lost commit."""
    folder.mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "tests").mkdir()
    (folder / "stats.py").write_text(BROKEN)
    (folder / "tests" / "test_stats.py").write_text(OLD_TESTS)
    (folder / ".gitignore").write_text("build/\n")
    base = _commit(folder, "base")
    (folder / "tests" / "test_stats.py").write_text(NEW_TESTS)
    test_patch = git(folder, "diff", base)
    (folder / "later.py").write_text("LATER = 1\n")
    (folder / "stats.py").write_text(CORRECT)
    fix = _commit(folder, f"the answer is {ANSWER}")
    git(folder, "tag", "-a", "v2", "-m", f"with {ANSWER}")
    git(folder, "notes", "add", "-m", ANSWER)
    (folder / "stats.py").write_text(f"{CORRECT}# stashed\n")
    git(folder, "stash", "-q")
    git(folder, "update-ref", "refs/remotes/origin/main", fix)
    git(folder, "remote", "add", "origin", "https://example.com/answer.git")
    (folder / "stats.py").write_text(f"{CORRECT}# lost\n")
    _commit(folder, "lost")
    git(folder, "reset", "-q", "--hard", fix)
    git(folder, "gc", "-q")
    (folder / ".git" / "FETCH_HEAD").write_text(f"{fix}\t\tbranch 'main' of https://example.com/answer\n")
    (folder / ".git" / "hooks").mkdir(exist_ok=True)
    (folder / ".git" / "hooks" / "post-checkout").write_text("#!/bin/sh\necho hooked >> hooked\n")
    (folder / ".git" / "hooks" / "post-checkout").chmod(0o755)
    return Made(folder, base, test_patch)


def _commit(folder: Path, message: str) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()
