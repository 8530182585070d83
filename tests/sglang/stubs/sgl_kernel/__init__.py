"""Stands in for SGLang's CUDA kernels on a CPU: any name can be imported, none can be called.

SGLang imports `sgl_kernel` at the top of modules whose kernels a float32 CPU run with torch_native attention never
reaches. A call that does reach one fails with the name of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """A kernel that can be imported but not run."""
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} was called: this SGLang runs on a CPU without its kernels")

    return kernel
