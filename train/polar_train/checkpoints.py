"""The checkpoints of a run: OUT/checkpoints/step-000001, each a model folder and what a resumed run needs beside it.

Invariant: a checkpoint has its name only once all of it is on the disk, so whatever bears such a name is whole; one is
removed only while a newer one is there. What resuming needs lies in the sub-folder `training`, not beside the weights:
an engine loads every safetensors file that it finds there. It knows no model: that is written by who calls.

    step-000001/            a Hugging Face folder
    step-000001/training/   state.json (step, version, batches done), state.safetensors (optimizer, random numbers)
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from polar_train.errors import BadInput
from polar_train.lag import Versions

_ORDER = Versions()
"""A checkpoint bears the name of its weights' version."""


@dataclass(frozen=True, slots=True)
class State:
    """Where a run stands."""

    step: int
    """Batches that changed the weights."""
    model: str
    """Fingerprint of the model that the run began with."""
    first_version: str
    """Name of that model's weights in the calls."""
    batches: dict[str, str]
    """Fingerprint of each batch that was taken, by file name, in their order."""

    @property
    def version(self) -> str:
        """Name of the weights."""
        return Versions(self.first_version).name(self.step)


def every(out: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    folder = out / "checkpoints"
    numbered = [(_ORDER.step(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return [path for _, path in sorted((step, path) for step, path in numbered if step)]


def newest(out: Path) -> Path | None:
    """The newest whole checkpoint of a run; None when it has none."""
    return (every(out) or [None])[-1]


def read(checkpoint: Path) -> tuple[State, dict[str, Tensor]]:
    """Where the run stood, and the tensors beside it.

    Raises BadInput when the folder is no checkpoint of a run.
    """
    folder = checkpoint / "training"
    try:
        written: dict[str, Any] = json.loads((folder / "state.json").read_text())  # Any: JSON
        return State(**written), load_file(folder / "state.safetensors")
    except (
        OSError,
        ValueError,
        TypeError,
        SafetensorError,
    ) as error:  # absent, foreign or broken: said as one sentence
        raise BadInput(
            f"{str(checkpoint)!r} cannot be resumed from: {error}; remove it to go on from the one before, if there is "
            "one, else from the start"
        ) from error


def write(out: Path, state: State, tensors: Mapping[str, Tensor], save_model: Callable[[Path], None]) -> Path:
    """Writes a checkpoint, which appears whole: `save_model` fills its folder, the rest is added.

    Raises BadInput when there is one of this step.
    """
    target = out / "checkpoints" / state.version
    if target.exists():
        raise BadInput(f"{str(target)!r} exists and is not overwritten")
    holder = target.parent / f".{target.name}"
    shutil.rmtree(holder, ignore_errors=True)  # left by a run that was killed while it wrote this one
    (holder / "training").mkdir(parents=True)
    save_model(holder)
    (holder / "training" / "state.json").write_text(json.dumps(asdict(state), indent=1) + "\n")
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()},
              holder / "training" / "state.safetensors")  # fmt: skip
    for path in (*holder.rglob("*"), holder):
        _on_disk(path)
    holder.rename(target)
    _on_disk(target.parent)
    return target


def prune(out: Path, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints, and what a killed run left of others; the newest always stays."""
    for left in (out / "checkpoints").glob(".step-*"):
        shutil.rmtree(left)
    for old in every(out)[: -max(keep, 1)]:
        gone = old.with_name(f".{old.name}")  # no longer whole, so no longer by its name
        old.rename(gone)
        shutil.rmtree(gone)


def _on_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
