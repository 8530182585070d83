"""Which engine is started, and how."""

import sys

from polar_train.launch import CPU_FLAGS, sglang_command, sglang_environment


def test_sglang_streams_deltas_from_the_model_folder():
    """On CUDA nothing but the address, the model and incremental streams is said."""
    command = sglang_command("m", "127.0.0.1", 30000, cuda=True)
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert command[3:] == ["--model-path=m", "--host=127.0.0.1", "--port=30000", "--incremental-streaming-output"]


def test_sglang_on_a_cpu_gets_the_flags_that_ran_there():
    """Float32 and the torch attention are what works without CUDA."""
    assert tuple(sglang_command("m", "h", 1, cuda=False)[-len(CPU_FLAGS) :]) == CPU_FLAGS


def test_sglang_on_a_cpu_gets_one_thread_unless_told():
    """The rest of the environment is kept."""
    assert sglang_environment({"A": "b"}, threads=None, cuda=False)["OMP_NUM_THREADS"] == "1"
    assert sglang_environment({"A": "b"}, threads=4, cuda=False)["OMP_NUM_THREADS"] == "4"
    assert sglang_environment({"A": "b"}, threads=4, cuda=True) == {"A": "b"}
