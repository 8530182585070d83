"""Children of a loop: waited for, ended in order, and their exit codes made into errors."""

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polar_train.commands import Stopped, run_all
from polar_train.errors import BadInput, CommandFailed

PYTHON = (sys.executable, "-c")
"""In place of polar-toolkit: a command is a script."""


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def never() -> bool:
    return False


def once(file: Path) -> Callable[[], bool]:
    """Stopping as soon as a file is there."""
    return file.exists


def test_what_commands_say_is_in_the_log(tmp_path, lock):
    """Also that of one of which some attempts failed, which ends with 3."""
    log = tmp_path / "rounds" / "00001.log"
    run_all([["print('one')"], ["print('two'); exit(3)"]], log, lock=lock, stopping=never, program=PYTHON)
    told = log.read_text()  # side by side: an unbuffered Python writes a word and the end of its line apart
    assert "one" in told
    assert "two" in told


def test_a_refusal_is_told_in_its_own_sentence(tmp_path, lock):
    """The last line that the command said."""
    words = ["import sys; print('no engine answers', file=sys.stderr); exit(2)"]
    with pytest.raises(BadInput, match=r"^no engine answers \(said by"):
        run_all([words], tmp_path / "log", lock=lock, stopping=never, program=PYTHON)


def test_when_one_command_fails_the_others_are_ended(tmp_path, lock):
    """And the error is that of the one that failed by itself."""
    waits, fails = ["import signal; signal.pause()"], ["exit(7)"]
    with pytest.raises(CommandFailed, match="ended with 7"):
        run_all([waits, fails], tmp_path / "log", lock=lock, stopping=never, program=PYTHON)


def test_a_stopped_command_ends_in_its_own_order(tmp_path, lock):
    """It gets SIGTERM, and has the time that it takes."""
    script = (
        "import pathlib, signal, sys\n"
        "def end(*_): pathlib.Path('ended').touch(); sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end); pathlib.Path('began').touch()\n"
        "while True: signal.pause()"
    )
    script = f"import os; os.chdir({str(tmp_path)!r})\n{script}"
    with pytest.raises(Stopped):
        run_all([[script]], tmp_path / "log", lock=lock, stopping=once(tmp_path / "began"), program=PYTHON)
    assert (tmp_path / "ended").exists()


def test_a_child_holds_the_lock_of_its_loop(tmp_path, lock):
    """So that no second loop begins while what a killed one started still works."""
    script = (
        f"import fcntl, os; other = os.open({str(tmp_path / 'lock')!r}, os.O_RDWR)\n"
        "try: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        f"except BlockingIOError: print('held, also by', os.fstat({lock}).st_ino)"
    )
    fcntl.flock(lock, fcntl.LOCK_EX)
    run_all([[script]], tmp_path / "log", lock=lock, stopping=never, program=PYTHON)
    assert (tmp_path / "log").read_text().startswith("held, also by")


def test_a_child_does_not_get_the_ctrl_c_of_the_terminal(tmp_path, lock):
    """It is in a process group of its own."""
    run_all([["import os; print(os.getpgrp())"]], tmp_path / "log", lock=lock, stopping=never, program=PYTHON)
    assert int((tmp_path / "log").read_text()) != os.getpgrp()
