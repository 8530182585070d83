"""Work on several processes."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polar_toolkit import parallel
from polar_toolkit.errors import Refusal

WAITS = """
import signal, sys, time
from pathlib import Path
from polar_toolkit import parallel

def wait(folder):
    Path(folder, str(multiprocessing.current_process().pid)).touch()
    time.sleep(600)

import multiprocessing
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it: nohup, "&"
    list(parallel.in_order(wait, [sys.argv[1]] * 4, 2))
"""


def die(job):
    os.kill(os.getpid(), signal.SIGKILL)


def divide(job):
    return 12 // job


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_jobs(workers):
    """In this process or in two others."""
    assert list(parallel.in_order(divide, [3, 1, 4, 2], workers)) == [4, 12, 3, 6]
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_worker_is_raised_here(workers):
    """And no worker stays."""
    with pytest.raises(ZeroDivisionError):
        list(parallel.in_order(divide, [3, 0, 4], workers))
    assert multiprocessing.active_children() == []


def test_a_worker_that_dies_is_one_sentence():
    """The usual cause is memory."""
    with pytest.raises(Refusal, match="out of memory"):
        list(parallel.in_order(die, [1, 2], 2))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_an_interrupted_or_killed_parent(tmp_path, end):
    """Also when only the parent is told."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    (tmp_path / "pids").mkdir()
    with subprocess.Popen([sys.executable, script, tmp_path / "pids"], stderr=subprocess.DEVNULL) as parent:
        try:
            until(lambda: len(list((tmp_path / "pids").iterdir())) == 2)
            parent.send_signal(end)
            assert parent.wait(60) != 0
        finally:
            parent.kill()
    until(lambda: not any(Path("/proc", path.name).exists() for path in (tmp_path / "pids").iterdir()))


def until(true):
    """Poll: what is waited for is another process."""
    for _ in range(600):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("waited a minute in vain")
