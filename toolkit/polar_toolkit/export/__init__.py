"""What other trainers read: trajectories and conversations in their file formats, under their field names.

Invariant: over one export a sampled token bears loss at one place at most, and stands behind the very tokens it was
sampled behind; what is left out is counted. One module a format, and the tuple below; a folder that this command did
not make is never replaced. docs/export.md says for each format how its trainer loads it, and what is lost.
"""

from __future__ import annotations

from pathlib import Path

from polar_toolkit import calls
from polar_toolkit import merged as folders
from polar_toolkit.errors import Refusal
from polar_toolkit.export import atif, harbor, sft, skyrl, slime, trl, verl
from polar_toolkit.export.source import Format, Source, Tally

FORMATS = (verl.FORMAT, slime.FORMAT, skyrl.FORMAT, trl.FORMAT, harbor.FORMAT, atif.FORMAT, sft.FORMAT)

__all__ = ["FORMATS", "Format", "Source", "Tally", "described", "export"]


def described() -> str:
    """The formats and what each is for, for people."""
    return "; ".join(f"{form.name}: {form.about}" for form in FORMATS)


def export(root: Path, name: str, out: Path, *, merged: Path, min_reward: float | None = None) -> Tally:
    """Write the runs under `root`, merged into `merged`, to the folder `out` in the format of that name.

    Raises Refusal, with nothing overwritten, for an unknown format, a foreign folder, or nothing to export.
    """
    form = next((form for form in FORMATS if form.name == name), None)
    if form is None:
        raise Refusal(f"no format {name!r}; give one of {', '.join(form.name for form in FORMATS)}")
    if min_reward is not None and form is not sft.FORMAT:
        raise Refusal(f"--min-reward {min_reward:g} is for sft: the baselines of {name} need every session of a group")
    source = Source(calls.find_runs(root), merged, min_reward)
    with folders.replacing(out, "export") as fresh:
        form.write(fresh, source)
        if not source.tally.rows:
            raise Refusal(f"nothing to export: {source.tally.reasons() or 'the runs have no trained tokens'}")
    return source.tally
