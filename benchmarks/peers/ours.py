"""This project's own merge: from rows with parents and suffixes, and from full prompts as an import has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.stage.grading import Row
from benchmarks.stage.scenarios import LINKED, WHOLE
from polar_toolkit import calls
from polar_toolkit.calls import Call
from polar_toolkit.trajectories import Trajectory, build
from polar_toolkit.tree import grow


class Linked:
    """From the calls of a run, as the interceptor records them."""

    package = "polar-mitm"
    native = "Calls, parent + suffix"
    note = "grow and build, to finished arrays"
    form = LINKED

    def read(self, folder: Path) -> list[Call]:
        """The calls of the run, token buffers as views of its table."""
        return calls.read(folder / self.form)

    def convert(self, read: list[Call]) -> list[Call]:
        """Nothing to do."""
        return read

    def merge(self, native: list[Call]) -> list[Trajectory]:
        """Forest, then finished arrays."""
        return build(grow(native))

    def rows(self, merged: list[Trajectory]) -> list[Row]:
        """A row a trajectory."""
        return [Row(one.input_ids, one.loss_mask.astype(np.bool_), one.logprobs) for one in merged]


class Whole(Linked):
    """From full prompts, without parents."""

    native = "Calls, full prompts"
    form = WHOLE
