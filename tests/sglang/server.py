"""Starts the real SGLang on a CPU and the embedded engine, each as a process of its own, and yields its base URL.

Invariant: the whole process group has ended when the context does, however the test ended. Readiness is read from the
server's own output, never guessed by waiting. SGLang lives in .sglang (Python 3.11) and is never imported here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest

from polar_train.launch import CPU_FLAGS

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".sglang" / "bin" / "python"
STUBS = Path(__file__).parent / "stubs"
READY = "ready to roll"
"""What SGLang 0.5.23 prints when it serves."""


@contextmanager
def sglang(model: Path, log: Path, *flags: str) -> Generator[str]:
    """A real SGLang 0.5.23 that serves `model` in float32 on one core; the output goes to `log`."""
    if not (ROOT / ".sglang" / ".ready").exists():
        pytest.fail("the environment of the real SGLang is missing: run `make sglang`", pytrace=False)
    port = _free_port()
    where = [f"--model-path={model}", "--host=127.0.0.1", f"--port={port}", "--max-total-tokens=20000"]
    command = [str(PYTHON), "-m", "sglang.launch_server", *where, *CPU_FLAGS, *flags]
    # One OpenMP thread: threads that spin on shared cores stop each other. Offline: nothing here may ask a model hub.
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(STUBS),
    }
    with _process(command, environment, log, READY):
        yield _healthy(f"http://127.0.0.1:{port}")


@contextmanager
def embedded(model: Path, log: Path) -> Generator[str]:
    """The embedded engine serving `model`, as `polar-train engine` starts it."""
    port = _free_port()
    command = [str(Path(sys.executable).parent / "polar-train"), "engine", str(model), "--embedded", f"--port={port}"]
    with _process(command, {"OMP_NUM_THREADS": "1"}, log, f":{port}"):
        yield _healthy(f"http://127.0.0.1:{port}")


@contextmanager
def _process(command: list[str], environment: Mapping[str, str], log: Path, ready: str) -> Generator[None]:
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        with log.open("w", buffering=1) as file:
            _until(ready, process.stdout, file, log)
            drain = threading.Thread(target=file.writelines, args=(process.stdout,))
            drain.start()
            try:
                yield
            finally:
                _end(process)
                drain.join()
    finally:
        _end(process)
        process.stdout.close()


def _until(ready: str, output: IO[str], file: IO[str], log: Path) -> None:
    for line in output:
        file.write(line)
        if ready in line:
            return
    file.flush()
    pytest.fail(f"the engine ended before it served:\n{log.read_text()[-3000:]}", pytrace=False)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the process and its children; SGLang's scheduler would outlive a signal to the parent alone."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(timeout=20)
        except ProcessLookupError:
            return  # the group is gone: nothing left to end
        except subprocess.TimeoutExpired:
            continue  # it did not heed SIGTERM: SIGKILL is next


def _healthy(url: str) -> str:
    httpx.get(f"{url}/health", timeout=60).raise_for_status()
    return url


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
