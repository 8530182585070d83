"""Processes are found by the mark of their sandbox, and ended until none is left."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager

from polar_toolkit.rollout.sandbox.marked import VARIABLE, Marked


@contextmanager
def started(marked: Marked, name: str, *words: str) -> Generator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, env={VARIABLE: marked.value(name), "PATH": "/usr/bin:/bin"})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_only_the_named_sandbox_is_ended():
    """Another sandbox of the same run goes on, and so does one of another run."""
    marked = Marked("marked-1")
    with (
        started(marked, "a", "sleep", "1000") as one,
        started(marked, "b", "sleep", "1000") as other,
        started(Marked("marked-10"), "a", "sleep", "1000") as elsewhere,
    ):
        assert set(marked.found()) == {"a", "b"}
        assert marked.end(["a"]) == 0
        assert one.wait(5) == -9
        assert (other.poll(), elsewhere.poll()) == (None, None)


def test_all_of_a_run_are_ended():
    """Without names, every sandbox of the run is meant."""
    marked = Marked("marked-2")
    with started(marked, "a", "sleep", "1000") as one, started(marked, "b", "sleep", "1000") as other:
        assert marked.end(None) == 0
        assert (one.wait(5), other.wait(5)) == (-9, -9)


def test_what_multiplies_is_ended():
    """Processes that start each other faster than one look at the machine are ended all the same."""
    marked = Marked("marked-3")
    with started(marked, "a", "sh", "-c", 'while :; do sh -c "sleep 1000 & sleep 0.01" & sleep 0.01; done'):
        assert marked.end(["a"]) == 0
        assert marked.found() == {}


def test_memory_is_the_sum_of_a_sandboxs_processes():
    """What its processes hold counts together; a sandbox without any holds nothing."""
    marked = Marked("marked-4")
    with started(marked, "a", "sleep", "1000"):
        assert 0 < marked.memory("a") < 100 << 20
        assert marked.memory("b") == 0
