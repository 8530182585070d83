"""The demo as a user runs it: once where no packet can leave the machine, once with a real SGLang as the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.provisions import ROOT, harness_binary
from tests.sglang.server import sglang

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def demo(out: Path, *flags: str, inside: tuple[str, ...] = ()) -> str:
    """What examples/demo.py prints; a failure shows all of it."""
    harness_binary("pi")
    command = [sys.executable, *inside, str(ROOT / "examples" / "demo.py"), "--out", str(out), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:])
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_loop_closes_and_no_packet_leaves_the_machine(tmp_path: Path):
    """The whole demo passes in a namespace with only lo, and the recorder there sees no try to leave."""
    demo(tmp_path / "demo", inside=("-m", "tests.bench.netns", sys.executable))
    report = json.loads((tmp_path / "demo" / "run" / "merged" / "report.json").read_text())
    assert report["tokens"]["share"] >= 0.95
    assert report["edges"]["exact"] > 0


def test_the_loop_closes_with_a_real_sglang(tmp_path: Path, smollm2: Path):
    """Intercept, merge, train, push and probe work with SGLang itself as the engine, one of its own."""
    with sglang(smollm2, tmp_path / "log", "--incremental-streaming-output") as url:
        demo(tmp_path / "demo", "--engine", url, "--model", str(smollm2), "--samples", "8")
