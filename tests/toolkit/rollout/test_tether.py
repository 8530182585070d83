"""The tether ends its process when the other end of its standard input is let go, and not before."""

from __future__ import annotations

import subprocess
import sys

_HELD = """
import asyncio, signal
from polar_toolkit.rollout.tether import Tether

async def wait():
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    Tether().running()
    print("tied", flush=True)
    await ended.wait()
    print("ended in good order")

asyncio.run(wait())
"""


def test_a_process_ends_with_whoever_holds_it():
    """By SIGTERM, to itself: there is time to record what is in flight. What is written to it is no end."""
    with subprocess.Popen([sys.executable, "-c", _HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
        assert held.stdin is not None
        assert held.stdout is not None
        assert held.stdout.readline() == b"tied\n"
        held.stdin.write(b"x")
        held.stdin.flush()
        assert held.poll() is None
        held.stdin.close()
        assert held.stdout.read() == b"ended in good order\n"
    assert held.returncode == 0
