"""The tutorial's pages, typed word for word in a fresh folder, with an empty home and where no packet can leave.

An indented block of a page is typed as it stands. One that ends in & is a server: the page's next fenced block is what
it says when it is ready, and that is waited for before the next block, as a reader does.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from polar_train.small_models import cache_folder, fetch
from tests.bench.provisions import HARNESS_BIN, ROOT, harness_binary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

READY = "for _ in $(seq 600); do if grep -qF {words} {log}; then break; fi; sleep 0.1; done\n"
END = "for job in $(jobs -p); do kill $job; done; wait\n"


def blocks(page: Path) -> list[tuple[str, str]]:
    """The blocks of a page in order: ("typed" or "shown", text)."""
    pattern = r"(?m)(?:^    .*\n)+|^```text\n(?s:(.*?))^```$"
    found = re.finditer(pattern, page.read_text())
    return [("typed", re.sub(r"(?m)^    ", "", m[0])) if m[1] is None else ("shown", m[1].strip()) for m in found]


def script(page: Path) -> str:
    """What is typed, as one shell script."""
    written, log = ["set -e\n"], ""
    for number, (kind, text) in enumerate(blocks(page)):
        if kind == "shown":
            written += [READY.format(words=shlex.quote(text), log=log)] if log else []
            log = ""
        elif text.rstrip().endswith("&"):
            log = f"server-{number}.log"
            written.append(f"{{\n{text}}} > {log} 2>&1\n")  # the server's output; its words are as they were
        else:
            written.append(text)
    return "".join([*written, END])


def typed(page: str, folder: Path) -> str:
    """What a page's commands print; a failure shows all of it."""
    harness_binary("pi")
    for name in ("addons", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "home").mkdir()
    (folder / "page.sh").write_text(script(ROOT / "docs" / "tutorial" / page))
    environment = os.environ | {
        "PATH": os.pathsep.join([str(HARNESS_BIN), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(folder / "home"), "POLAR_CACHE": str(cache_folder()), "PYTHONPATH": str(ROOT),
        "COLUMNS": "120", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.bench.netns", "bash", "page.sh"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    logs = "".join(f"\n{log.name}: {log.read_text()[-2000:]}" for log in folder.glob("server-*.log"))
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}{logs}"
    return done.stdout


def test_the_first_page_ends_with_a_batch(tmp_path: Path):
    """Two sessions of Pi by hand: every sampled token is trained, and the batch has both."""
    fetch("smollm2-135m-instruct")
    output = typed("1-one-session.md", tmp_path)
    assert re.search(r"trained\s+│ \d+\s+│ 100.0%", output), output
    batch = pl.read_parquet(tmp_path / "runs" / "first" / "merged" / "batches" / "*.parquet")
    assert set(batch["session_ids"].explode()) == {"capital-1", "capital-2"}


def test_the_second_page_ends_with_a_row_of_every_attempt_and_a_batch(tmp_path: Path):
    """Pi on the ten example tasks in local sandboxes: nothing failed but the model, and what it sampled is trained."""
    fetch("smollm2-135m-instruct")
    output = typed("2-rollouts.md", tmp_path)
    rows = pl.read_parquet(tmp_path / "runs" / "ten" / "rollouts.parquet")
    assert len(rows) == 20, output
    assert set(rows["status"]) <= {"completed", "timeout"}, rows.select("attempt_id", "status", "note").to_dicts()
    assert rows["calls"].min() >= 1
    assert rows["trained"].all()
    batch = pl.read_parquet(tmp_path / "runs" / "ten" / "merged" / "batches" / "*.parquet")
    assert set(batch["session_ids"].explode()) == set(rows["session_id"])
