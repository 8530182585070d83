"""Which engine `polar-train engine` starts, and with which flags.

Invariant: SGLang is a command line, never an import; whether it is there is asked of the import system, because
importing it costs seconds and half a gigabyte. It starts nothing itself.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping

CPU_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-overlap-schedule",
    "--dtype=float32",  # the CPU kernels are exact in float32, and bfloat16 has none on AVX2
    "--skip-server-warmup",
    "--sleep-on-idle",
)
"""What SGLang 0.5.23 needs on a machine without CUDA (observed 2026-11-29)."""


def has_sglang() -> bool:
    """Whether SGLang is installed in this environment."""
    return importlib.util.find_spec("sglang") is not None


def sglang_command(model: str, host: str, port: int, *, cuda: bool) -> list[str]:
    """The command that serves a model by SGLang with streamed deltas, on CUDA or on the CPU."""
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        f"--model-path={model}",
        f"--host={host}",
        f"--port={port}",
    ]
    return [*command, "--incremental-streaming-output", *(() if cuda else CPU_FLAGS)]


def sglang_environment(environment: Mapping[str, str], *, threads: int | None, cuda: bool) -> dict[str, str]:
    """The environment for that command; on a CPU one OpenMP thread unless told: spinning threads collapse there."""
    if cuda:
        return dict(environment)
    return {**environment, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads or 1)}
