"""A script for mitmdump that ends it, in good order, when the process that started it is gone, however that ended.

Invariant: mitmdump outlives its starter by no more than it takes to record what is in flight and to seal the journal.
The starter holds the other end of mitmdump's standard input, which the kernel closes with it; nothing is ever written
there. It knows nothing of calls.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys


class Tether:
    """The script."""

    def running(self) -> None:
        """Begin to watch the standard input."""
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)

    def _read(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            os.kill(os.getpid(), signal.SIGTERM)
