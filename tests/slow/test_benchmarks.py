"""Benchmarks at a tiny size: they run, and what does not depend on the size holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.bench.provisions import ROOT, harness_binary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def printed(name: str, *words: str) -> str:
    """What a benchmark prints; a failure shows all of it."""
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--quick", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_ours_has_full_marks_and_every_peer_is_measured():
    """No sampled token is lost, doubled or out of its context in any scenario; make peers installed all four peers."""
    output = printed("merge.py", "--only", "mergers")
    assert "ours: scenarios with full marks: 4.00 of 4 >= 4 met" in output
    assert "ours-full-prompts: scenarios with full marks: 4.00 of 4 >= 4 met" in output
    assert "peers that could not be measured: 0.00 peers <= 0 met" in output, output


def test_the_measures_from_disk_run():
    """A run is written, merged by the command line and measured; all its tokens are trained."""
    output = printed("merge.py", "--only", "disk")
    assert "sampled tokens trained: 1.00 of all >= 1 met" in output
    assert "peak memory" in output


def test_the_measures_of_rollouts_run():
    """Staged and unstaged, simulated and with Pi in local sandboxes: every attempt completes, a start is quick."""
    harness_binary("pi")
    output = printed("rollouts.py")
    assert "start of a prepared attempt, p50" in output
    assert "CPU of the runner, Pi in local sandboxes" in output
    assert "40 simulated attempts" in output
    assert "engine busy from the first run to the last" in output


def test_the_measures_of_a_gradient_run():
    """Pi is recorded and trained in three layouts: one gradient, and the tree computes each token once."""
    harness_binary("pi")
    output = printed("train.py")
    assert "pi: P, the first prompt" in output
    assert re.search(r"pi: norm of the gradient, tree to packed: [0-9.]+ millionths <= 10 met", output), output
    assert "pi: tree, faster" in output
    assert "pi: peak memory of the tree" in output
