"""A run has its folder to itself, and ends in order when it is asked to."""

import os
import signal
import threading

import pytest

from polar_train.errors import BadInput
from polar_train.lifetime import alone, interrupts


def test_a_second_holder_is_refused(tmp_path):
    """With a sentence, and only as long as there is a first."""
    out = tmp_path / "out"
    with alone(out), pytest.raises(BadInput, match="another process is training in"), alone(out):
        pass
    with alone(out):
        assert out.is_dir()


def test_a_patient_one_waits(tmp_path):
    """It has the folder as soon as the first lets it go."""
    first = alone(tmp_path)
    first.__enter__()
    threading.Timer(0.1, first.__exit__, (None, None, None)).start()
    with alone(tmp_path, patience_s=60):
        pass


def test_a_folder_is_held_as_long_as_the_descriptor_is_open(tmp_path):
    """A child that inherited it holds it on."""
    with alone(tmp_path) as descriptor:
        inherited = os.dup(descriptor)
    with pytest.raises(BadInput, match="another process"), alone(tmp_path):
        pass
    os.close(inherited)
    with alone(tmp_path):
        pass


def test_a_file_is_one_sentence(tmp_path):
    """And stays what it is."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="is a file: give a folder"), alone(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_acts(number):
    """What the second does is what it did before; afterwards all is as it was."""
    before = signal.getsignal(number)
    with interrupts() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
        assert signal.getsignal(number) is before
    assert signal.getsignal(number) is before
