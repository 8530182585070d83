"""A training run as one TOML file: read whole and checked whole before anything starts.

Invariant: a key that is not known is refused, so that a misspelled one is never a run with a default in its place; what
is not in the file has the default of the value it fills. Paths are relative to the file. It loads and starts nothing.

Each table fills one dataclass, whose fields are the keys: docs/training.md shows them all with what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from polar_mitm.sampling import Sampling
from polar_toolkit.advantages import Advantage
from polar_toolkit.batches import Weighting
from polar_train.grpo import Settings
from polar_train.lag import Lag
from polar_train.objective import Objective
from polar_train.tables import Table, load

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class EngineSet:
    """The engines that serve the weights as they become better."""

    urls: tuple[str, ...] = ()
    """All of them get every push, or none does; without one nothing is pushed."""
    version: str = "default"
    """What they call the weights of `model` before the first push."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which checkpoints are written, and which stay."""

    every: int = 1
    """After so many steps; after the last one always."""
    keep: int = 2
    """The newest so many stay, and the last one always."""


@dataclass(frozen=True, slots=True)
class RolloutSide:
    """What `polar-train loop` tells `polar-toolkit rollout` and the batches, under the toolkit's own names."""

    tasks: Path
    harness: str
    """A name that `polar-toolkit harness list` prints, or a folder."""
    way: str = ""
    command: str = ""
    samples: int = 8
    """Attempts at each task: the size of a group."""
    groups: int = 4
    """Groups of a batch: tasks of a round."""
    max_tokens: int = 8192
    """Of a packed row."""
    weighting: Weighting = "token"
    advantage: Advantage = "grpo"
    sandbox: str = "local"
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Any: JSON
    pools: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many attempts may be in the stages init, ready, run and post at once."""
    budgets: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of all tasks, in place of their own: init_seconds, run_seconds, post_seconds, turns, tokens."""
    seed: int = 0
    enough: int | None = None
    tries: int = 2
    shuffle_rewards: bool = False
    """The control of an experiment: rewards change places within a round before they are learned from."""
    listen_host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Config:
    """A training run."""

    model: Path
    """Folder of the model that it begins with."""
    batches: Path
    """A Parquet file, or a folder of one batch a file, read in the order of their names."""
    out: Path
    """What is written: checkpoints/, metrics.jsonl, and of a loop rounds/ and batches/."""
    follow: bool = False
    """Wait for more files in `batches` instead of ending behind the last."""
    updates: int | None = None
    """End behind so many steps; None when the batches end, which a run that follows never sees."""
    threads: int | None = None
    """CPU threads; all cores unless given."""
    seed: int = 0
    precision: Precision = "float32"
    """Of the forward and backward pass; weights and optimiser are float32."""
    settings: Settings = field(default_factory=Settings)
    lag: Lag = field(default_factory=Lag)
    engines: EngineSet = field(default_factory=EngineSet)
    checkpoints: Keeping = field(default_factory=Keeping)
    reference: Path | None = None
    """Folder of the model that `kl` keeps near."""
    rollout: RolloutSide | None = None


POOLS = ("init", "ready", "run", "post")
"""Keys of `pools`."""
BUDGETS = ("init_seconds", "run_seconds", "post_seconds", "turns", "tokens")
"""Keys of `budgets`."""
_TABLES = ("update", "objective", "lag", "engines", "checkpoints", "rollout")


def read(file: Path) -> Config:
    """What a TOML file asks for. Raises BadInput, naming file and key, for the first thing that is wrong in it."""
    top = load(file)
    settings, reference = _settings(top)
    rollout = _rollout(top.table("rollout")) if "rollout" in top.values else None
    batches = Path(top.value("out", Path)) / "batches" if rollout else None  # where the loop puts them
    if batches is None or "batches" in top.values:
        batches = Path(top.value("batches", Path))
    config = top.fill(
        Config, beside=(*_TABLES, "batches"), batches=batches, settings=settings, reference=reference, rollout=rollout,
        lag=_lag(top.table("lag")), engines=_engines(top.table("engines")),
        checkpoints=top.table("checkpoints").fill(Keeping),
    )  # fmt: skip
    if config.follow and batches.is_file():
        raise top.wrong("batches", "a run that follows reads a folder")
    return config


def _settings(top: Table) -> tuple[Settings, Path | None]:
    table = top.table("objective")
    objective = table.fill(Objective, beside=("reference",))
    reference = Path(table.value("reference", Path)) if "reference" in table.values else None
    if (objective.kl > 0) != (reference is not None):
        raise table.wrong("kl", f"reference is {table.values.get('reference')!r}; give both or none")
    return _update(top.table("update"), objective), reference


def _update(table: Table, objective: Objective) -> Settings:
    settings = table.fill(Settings, objective=objective)
    for key in ("beta1", "beta2"):
        if getattr(settings, key) >= 1:
            raise table.wrong(key, "write a number from 0 to below 1")
    return settings


def _lag(table: Table) -> Lag:
    lag = table.fill(Lag)
    if lag.beyond > 1:
        raise table.wrong("beyond", "write a factor from 0, which drops, to 1")
    return lag


def _engines(table: Table) -> EngineSet:
    engines = table.fill(EngineSet)
    places = {url.rstrip("/") for url in engines.urls}
    if len(places) < len(engines.urls) or not all(url.startswith(("http://", "https://")) for url in places):
        raise table.wrong("urls", "write each engine once, as http://HOST:PORT")
    return engines


def _rollout(table: Table) -> RolloutSide:
    side = table.fill(RolloutSide)
    table.table("pools").allow(POOLS)
    budgets = table.table("budgets")
    budgets.allow(BUDGETS)
    for key in budgets.values.keys() & {"turns", "tokens"}:
        budgets.value(key, int)
    try:
        Sampling.parse(json.dumps(side.sampling))
    except (ValueError, TypeError) as error:  # TypeError: a date, which JSON has not
        raise table.wrong("sampling", str(error)) from error
    folder = table.file.parent / side.harness
    return replace(side, harness=str(folder.resolve())) if folder.is_dir() else side
