"""Stop strings, searched in text: an engine searches a window of tokens and misses those that are cut otherwise.

Invariant: which stop ends a text, and where, depends on the text alone, not on the pieces in which it came. Pure.
"""

from __future__ import annotations


def first(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first stop in `text` begins, and which it is; of those at one place, the one named first."""
    found = [(place, order, stop) for order, stop in enumerate(stops) if stop and (place := text.find(stop)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


def held(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop."""
    longest = max((len(stop) for stop in stops), default=0)
    return next(
        (n for n in range(min(longest - 1, len(text)), 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0
    )
