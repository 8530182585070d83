"""The `polar-toolkit` command: imports the command line, or says which extra is missing.

Invariant: only the standard library is imported before the check, so the sentence is always reached.
"""

import sys


def main() -> None:
    """Run the command line; exit 1 with one sentence when a third-party module is missing."""
    try:
        from polar_toolkit.cli import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("polar_"):
            raise
        sys.exit(f"polar-toolkit needs the module {error.name!r}: pip install 'polar-mitm[toolkit]'")
    app()
