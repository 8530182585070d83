"""The command's first line: says which extra is missing instead of showing a traceback.

Invariant: only the standard library is imported at the top. It knows no command.
"""

from __future__ import annotations

import os
import sys

PACKAGES = ("polar_mitm", "polar_toolkit", "polar_train")


def main() -> None:
    """Runs `polar-train`; exits 1 with one sentence when a module of the extra is missing."""
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "PASSIVE"
    )  # torch's threads spin otherwise: three times the CPU on shared cores
    try:
        from polar_train.cli import app

        app()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(PACKAGES):  # ours: a fault of the installation, so the traceback is the help
            raise
        sys.exit(f"polar-train needs the module {error.name!r}: pip install 'polar-mitm[train]'")
