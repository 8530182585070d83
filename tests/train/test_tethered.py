"""A command of polar-toolkit that ends with the process that started it."""

import signal
import subprocess
import sys

WAITING = (
    "import signal, threading\n"
    "from polar_train.tethered import watch\n"
    "threading.Thread(target=watch, daemon=True).start()\n"
    "print('waiting', flush=True)\n"
    "while True: signal.pause()"
)


def test_it_gets_sigterm_once_the_other_end_of_its_input_is_closed():
    """Which the kernel closes with the starter, however that ended."""
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == b"waiting\n"
        child.stdin.close()
        assert child.wait(60) == -signal.SIGTERM


def test_it_is_polar_toolkit():
    """With the same words and exit codes, while its input is open."""
    command = [sys.executable, "-m", "polar_train.tethered", "rollout"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stderr
        assert b"give RUN" in child.stderr.read()
        assert child.wait() == 2
        assert child.stdin
        child.stdin.close()
