"""`polar-toolkit` as a child process that ends, in good order, when the process that started it is gone.

Invariant: the starter holds the other end of this one's standard input, which the kernel closes with it, however it
ended; nothing is ever written there. Torch is not imported. It knows no command of the toolkit.
"""

from __future__ import annotations

import os
import signal
import threading

from polar_toolkit.entry import main


def watch(descriptor: int = 0) -> None:
    """Sends this process SIGTERM, as who stops it in order does, once the other end of the descriptor is closed."""
    while os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=watch, daemon=True).start()
    main()
