"""benchmarks/merge.py at a tiny size: every merger is measured, and this project's own has full marks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.bench.provisions import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def printed(*words: str) -> str:
    """What the benchmark prints; a failure shows all of it."""
    command = [sys.executable, str(ROOT / "benchmarks" / "merge.py"), "--quick", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_ours_has_full_marks_and_every_peer_is_measured():
    """No sampled token is lost, doubled or out of its context in any scenario; make peers installed all four peers."""
    output = printed("--only", "mergers")
    assert "ours: scenarios with full marks: 4.00 of 4 >= 4 met" in output
    assert "ours-full-prompts: scenarios with full marks: 4.00 of 4 >= 4 met" in output
    assert "peers that could not be measured: 0.00 peers <= 0 met" in output, output


def test_the_measures_from_disk_run():
    """A run is written, merged by the command line and measured; all its tokens are trained."""
    output = printed("--only", "disk")
    assert "sampled tokens trained: 1.00 of all >= 1 met" in output
    assert "peak memory" in output
