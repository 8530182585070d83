"""What a training run says of each step: one line of JSON in OUT/metrics.jsonl.

Invariant: the steps of a file rise from line to line, each there once, also after a run that was killed and does steps
again. Numbers that are not finite are null in the file, since JSON has none. It computes no figure and draws none.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

import orjson

from polar_train.errors import BadInput

FILE = "metrics.jsonl"
"""Name of the file in the folder of a run."""


@dataclass(frozen=True, slots=True)
class Record:
    """Figures of one step, which takes one batch; of its last update, before that changed the weights."""

    step: int
    """How many steps changed the weights so far, this one included: the first is 1."""
    batch: str
    """Name of the batch's file."""
    version: str
    """Name of the weights that the step made."""
    at: float
    """When the step ended, in Unix seconds."""
    seconds: float
    """That the step took: reading, forward and backward, the update, the checkpoint; not waiting for the batch."""
    reward_mean: float | None
    """Over the batch's sessions; None where the batch does not say."""
    sessions: int
    groups: int
    dead_groups: int
    """Groups whose rewards are all equal, so that they teach nothing."""
    loss: float
    grad_norm: float
    """Before clipping."""
    ratio_mean: float
    clip_share: float
    """Share of the trained tokens whose gradient the clip removed."""
    kl_mean: float
    """k3 estimate of KL(policy || reference) a token, in nats; 0 without a reference."""
    entropy_mean: float
    """Of the distributions that the trained tokens were drawn from, in nats."""
    gap_mean: float
    """Mean |logprob(train) - logprob(engine)| a token, in nats."""
    gap_max: float
    lag_mean: float
    """Steps between the weights that sampled a token and those that are trained on it."""
    lag_max: int
    tokens_beyond_lag: int
    """Tokens that were sampled too many steps ago: dropped or weighted down."""
    tokens_trained: int
    """Tokens that bear loss."""
    tokens_computed: int
    """Tokens that went through the model: how much of it depends on the layout."""
    tokens_per_second: float
    """tokens_trained a second of the step without its checkpoint and push: comparable between layouts."""
    idle_s: float
    """Seconds in which the engines served nothing because of the new weights; 0 without engines."""


def append(out: Path, record: Record) -> None:
    """Writes the step behind the others of the run in `out`, and has it on the disk before it returns.

    Lines of this step and of later ones, which a killed run left, go, as does a torn last line. Call it before the
    step's checkpoint is in place: a resumed run then does the step again rather than miss its line.
    """
    file = out / FILE
    line = orjson.dumps(asdict(record), option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    if _ends_before(file, record.step):
        with file.open("ab") as stream:
            _to_disk(stream, line)
        return
    kept = [earlier for earlier in _records(file) if earlier.step < record.step]
    replaced = file.with_suffix(".tmp")
    with replaced.open("wb") as stream:
        _to_disk(stream, b"".join(orjson.dumps(earlier) + b"\n" for earlier in kept) + line)
    replaced.replace(file)


def read(out: Path) -> list[Record]:
    """The steps of the run in `out`, in their order; a torn last line is left out.

    Raises BadInput when there are none, or when a line is not such a record.
    """
    file = out / FILE
    if not file.is_file():
        raise BadInput(f"{str(out)!r} holds no {FILE}: give the folder that `polar-train run` or `loop` writes to")
    records = _records(file)
    if not records:
        raise BadInput(f"{str(file)!r} holds no step yet: wait until the first has ended")
    return records


def _ends_before(file: Path, step: int) -> bool:
    """Whether a line of that step may simply be written behind what is there."""
    lines = _lines(file)
    if not lines:
        return True
    return lines[-1].endswith(b"\n") and _record(lines[-1], f"{str(file)!r} line {len(lines)}").step < step


def _lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines(keepends=True) if file.exists() else []


def _to_disk(stream: BinaryIO, text: bytes) -> None:
    stream.write(text)
    stream.flush()
    os.fsync(stream.fileno())


def _records(file: Path) -> list[Record]:
    lines = [line for line in _lines(file) if line.endswith(b"\n")]
    return [_record(line, f"{str(file)!r} line {number}") for number, line in enumerate(lines, start=1)]


def _record(line: bytes, where: str) -> Record:
    try:
        given: Any = orjson.loads(line)  # Any: JSON
    except orjson.JSONDecodeError as error:
        raise BadInput(f"{where} is not JSON ({error}): the file is not the metrics of a run") from error
    names = [field.name for field in fields(Record)]
    if not isinstance(given, dict) or sorted(given) != sorted(names):
        raise BadInput(f"{where} is not the record of a step, whose entries are {', '.join(names)}: {line[:80]!r}")
    return Record(**{name: _value(name, given[name], where) for name in names})


def _value(name: str, given: Any, where: str) -> Any:
    kind = _KINDS[name]
    if given is None and kind is float:
        return float("nan")
    if isinstance(0.0, kind) and type(given) is int:
        return float(given)
    if not isinstance(given, kind) or isinstance(given, bool):
        raise BadInput(f"{name} of {where} is {given!r}, expected {kind}")
    return given


_KINDS: dict[str, Any] = get_type_hints(Record)
"""Of each entry. Any: a type or a union of types, for isinstance."""
