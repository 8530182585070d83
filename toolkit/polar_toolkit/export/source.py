"""What a format is, what it is made from, and the count of what was written.

Invariant: whoever hands out rows or conversations counts what it hands out and what it leaves out, so a format cannot
forget to. It reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Tally:
    """What became of the sampled tokens; it grows while an export is written."""

    rows: int = 0
    """Trajectories, turns or conversations written, in the format's own unit."""
    trained: int = 0
    """Sampled tokens that bear loss in the export."""
    sampled: int = 0
    """Sampled tokens of the runs."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Trainable tokens that are not in it, by reason: no_reward, below_min_reward."""

    def leave_out(self, reason: str, tokens: int) -> None:
        """Count tokens that are not exported."""
        self.left_out[reason] = self.left_out.get(reason, 0) + tokens

    def reasons(self) -> str:
        """The reasons with their counts, for people."""
        return ", ".join(f"{reason} {tokens:,}" for reason, tokens in self.left_out.items())

    def __str__(self) -> str:
        share = self.trained / self.sampled if self.sampled else 0.0
        rows = f"{self.rows:,} row{'s' if self.rows != 1 else ''}"
        left_out = f"; left out: {self.reasons()}" if self.left_out else ""
        return f"{rows}, {self.trained:,} of {self.sampled:,} sampled tokens trained / {share:.1%}{left_out}"


@dataclass(frozen=True, slots=True)
class Source:
    """The runs, the folder that they were merged into, and the count."""

    runs: list[Path]
    merged: Path
    min_reward: float | None = None
    """For conversations: leave out sessions with a smaller reward, or none."""
    tally: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write an export."""

    name: str
    about: str
    """What it is for, in half a sentence."""
    write: Callable[[Path, Source], None]
    """Fill an empty folder."""
