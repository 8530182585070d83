"""The processes of a benchmark, and what they cost: CPU seconds and resident memory from /proc.

Invariant: every process that is started ends with its block. It measures nothing by itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from polar_train.small_models import fetch

ROOT = Path(__file__).parents[2]
_START_SECONDS = 120
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """A running process and the port that it serves on."""

    pid: int
    port: int
    ca: Path | None = None
    """Its certificate authority, when it intercepts."""

    def cpu(self) -> float:
        """CPU seconds so far, of all its threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory(self, name: str = "VmRSS") -> float:
        """Resident memory in MB; `VmHWM` is its peak."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024

    def forget_peak(self) -> None:
        """Let `VmHWM` begin again from the present size."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@contextmanager
def engine(pace: float = 0.0, *, cumulative: bool = False, varied: bool = False) -> Generator[Process]:
    """The word engine while inside the block."""
    command = [sys.executable, "-m", "benchmarks.stage.engine", str(fetch("qwen3-tokenizer")), f"--pace={pace}"]
    command += ["--cumulative"] if cumulative else []
    command += ["--varied"] if varied else []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Process(process.pid, int(process.stdout.readline()))
        finally:
            process.kill()


@contextmanager
def interceptor(folder: Path, engine: Process, **options: str) -> Generator[Process]:
    """`mitmdump -s addons/polar.py` on a run folder in `folder`."""
    run = folder / "run"
    settings = {
        "polar_engine": f"http://127.0.0.1:{engine.port}", "polar_run": str(run),
        "polar_tokenizer": str(fetch("qwen3-tokenizer")),
    }  # fmt: skip
    with _mitmdump(folder, ROOT / "addons" / "polar.py", 0, settings | options) as process:
        yield _when_up(process, run / "proxy.json", folder)


@contextmanager
def canned(folder: Path) -> Generator[Process]:
    """The same mitmdump with an addon that answers by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with _mitmdump(folder, ROOT / "benchmarks" / "stage" / "canned.py", port, {}) as process:
        _until(lambda: _accepts(port), process, folder)
        yield Process(process.pid, port, folder / "confdir" / "mitmproxy-ca-cert.pem")


@contextmanager
def _mitmdump(folder: Path, addon: Path, port: int, settings: dict[str, str]) -> Generator[subprocess.Popen[bytes]]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sys.executable).parent / "mitmdump"), "-q", "-s", str(addon), "--listen-host", "127.0.0.1"]
    command += ["--listen-port", str(port), "--set", f"confdir={folder / 'confdir'}"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield process
        finally:
            process.terminate()


def _when_up(process: subprocess.Popen[bytes], where: Path, folder: Path) -> Process:
    _until(where.exists, process, folder)
    facts = json.loads(where.read_text())
    return Process(process.pid, int(facts["port"]), Path(facts["ca"]))


def _until(up: object, process: subprocess.Popen[bytes], folder: Path) -> None:
    assert callable(up)
    deadline = time.monotonic() + _START_SECONDS
    while not up():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"mitmdump did not come up:\n{(folder / 'log').read_text()}")
        time.sleep(0.05)


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
