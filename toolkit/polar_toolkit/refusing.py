"""How a command says no: one sentence on standard error, and exit code 2.

Invariant: only what is meant for people is caught, a Refusal and a missing extra; a fault of ours keeps its traceback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import typer

from polar_toolkit.errors import Refusal


def refusing[**P, R](command: Callable[P, R], *, extra: str = "toolkit") -> Callable[P, R]:
    """Print a Refusal, or the name of a module that `extra` installs, as one sentence and exit with 2."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except Refusal as refusal:
            sentence, cause = str(refusal), refusal
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("polar_"):
                raise
            sentence, cause = f"it needs the module {error.name!r}: pip install 'polar-mitm[{extra}]'", error
        typer.echo(f"polar-toolkit: {sentence}", err=True)
        raise typer.Exit(2) from cause

    return wrapped
