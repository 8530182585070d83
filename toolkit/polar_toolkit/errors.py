"""What a command refuses to do, said in one sentence that names the thing and the remedy.

Invariant: a message stands alone on a terminal: it names the file or value and what to do. This module knows nothing
of calls or tokens.
"""

from __future__ import annotations


class Refusal(Exception):
    """The input cannot be used as asked; nothing was overwritten. Commands print it and exit with 2."""


class UnreadableFile(Refusal):
    """A file of a run or of a merged folder is truncated, malformed, or not one of ours."""
