"""Batch Parquet to rows of numpy buffers: the one door through which training data enters.

Invariant: a `Row` that left this module obeys the whole contract of its columns (types, lengths, positions, mask,
finite numbers), and the loss weights of all rows add up to what the batch says, 1 unless it says otherwise. Token ids
are never Python lists. It does not know the model: whether ids fit a vocabulary is asked by the step.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from polar_train.errors import BadInput

Int_T = npt.NDArray[np.int32]
Float_T = npt.NDArray[np.float32]
Mask_T = npt.NDArray[np.bool_]

TOKEN_COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("input_ids", pa.int32()),
    ("position_ids", pa.int32()),
    ("loss_mask", pa.uint8()),
    ("old_logprobs", pa.float32()),
    ("advantages", pa.float32()),
    ("versions", pa.string()),
    ("temperature", pa.float32()),
    ("loss_weight", pa.float32()),
)
"""Columns with one entry a token."""

TRAJECTORY_COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    ("session_ids", pa.string()),
    ("group_ids", pa.string()),
    ("trajectory_ids", pa.string()),
    ("lengths", pa.int32()),
)
"""Columns with one entry a packed trajectory."""

WEIGHT_TOLERANCE = 1e-3
"""Largest relative error of the sum of a batch's loss weights (they are stored as float32)."""

WEIGHT_SUM = b"loss_weight_sum"
"""Key in a file's metadata: what the loss weights of the batch in it add up to. Such a file is a whole batch."""

SUMMARY = b"polar_batch"
"""Key in a file's metadata: what the batch was made of, as JSON; see BatchSummary."""


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row: trajectories one after the other, each with positions from 0."""

    input_ids_T: Int_T
    position_ids_T: Int_T
    loss_mask_T: Mask_T
    """True on sampled tokens that are trained here; each is predicted by the token before it."""
    old_logprobs_T: Float_T
    """log_softmax(logits / temperature) at sampling time; 0 off the mask."""
    advantages_T: Float_T
    temperature_T: Float_T
    loss_weight_T: Float_T
    """Normalised over the whole batch: loss = sum(weight * token loss)."""
    lengths: Int_T
    """Tokens of each packed trajectory."""
    trajectory_ids: tuple[str, ...]
    session_ids: tuple[str, ...]
    """Of each packed trajectory."""
    group_ids: tuple[str, ...]
    """Of each packed trajectory; a session without a group is one by itself, with its name."""
    versions_T: Int_T
    """Index into `version_names` of the weights that sampled the token."""
    version_names: tuple[str, ...]

    @property
    def trained(self) -> int:
        """Tokens that bear loss."""
        return int(self.loss_mask_T.sum())

    @property
    def versions(self) -> frozenset[str]:
        """Weight versions that sampled the trained tokens."""
        return frozenset(self.version_names[code] for code in np.unique(self.versions_T[self.loss_mask_T]).tolist())


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """What a batch was made of."""

    sessions: int
    groups: int
    dead_groups: int
    """Groups whose rewards are all equal: they teach nothing."""
    reward_mean: float | None
    """Over the sessions; None where the file does not say it."""
    tokenizer: str | None
    """Fingerprint of the tokenizer that the prompts were made with; None where the file does not say it."""


def read_batches(batches: Path) -> list[Row]:
    """All rows of a batch: of a Parquet file, or of the `*.parquet` files of a folder, in the order of their names.

    Raises BadInput, naming the file, the column and the row, when they do not follow the batch contract.
    """
    rows = list(stream(batches))
    if not rows:
        raise BadInput(f"{str(batches)!r} holds no rows: give rewards to the sessions and run `polar-toolkit batch`")
    return rows


def stream(batches: Path) -> Iterator[Row]:
    """The rows of `read_batches` one after the other, with one row group of a file in memory at a time.

    Raises BadInput, behind the last row when the loss weights of all do not add up.
    """
    files = _files(batches)
    expected = _weight_sum(batches, files)
    total, trained = 0.0, 0
    for file in files:
        for row in _read_file(file):
            total, trained = total + float(row.loss_weight_T.sum(dtype=np.float64)), trained + row.trained
            yield row
    if trained and abs(total - expected) > WEIGHT_TOLERANCE * expected:
        raise BadInput(
            f"loss_weight of {str(batches)!r} adds up to {total:.6g}, not {expected:.6g}: "
            "pass the whole batch, not a part"
        )


def read_summary(batches: Path) -> BatchSummary:
    """What the writer said of a batch, else what its rows show. Raises BadInput as `read_batches` does."""
    return _stated(batches) or _counted(batches)


def read_tokenizer(batches: Path) -> str | None:
    """Fingerprint of the tokenizer of a batch; None where the file does not say it. Raises BadInput."""
    stated = _stated(batches)
    return stated.tokenizer if stated else None


def _stated(batches: Path) -> BatchSummary | None:
    stated = _metadata(_files(batches)[0]).get(SUMMARY)
    if stated is None:
        return None
    try:
        said = json.loads(stated)
        return BatchSummary(**{name: said[name] for name in BatchSummary.__slots__})
    except (ValueError, KeyError, TypeError) as error:  # not what `polar-toolkit batch` writes: said as one sentence
        raise BadInput(
            f"metadata {SUMMARY.decode()!r} of {str(batches)!r} is {stated[:200]!r}: make the batch again with "
            "`polar-toolkit batch`"
        ) from error


def _counted(batches: Path) -> BatchSummary:
    """A group is dead when no token of it has an advantage."""
    sessions: set[tuple[str, str]] = set()
    alive: set[str] = set()
    for row in stream(batches):
        sessions |= set(zip(row.group_ids, row.session_ids, strict=True))
        sums = np.add.reduceat(np.abs(row.advantages_T), np.cumsum(row.lengths) - row.lengths)
        alive |= {group for group, moved in zip(row.group_ids, sums.tolist(), strict=True) if moved}
    groups = {group for group, _ in sessions}
    return BatchSummary(len(sessions), len(groups), len(groups - alive), None, None)


def _weight_sum(batches: Path, files: list[Path]) -> float:
    """What the loss weights of these files together must add up to."""
    stated = [value for file in files if (value := _metadata(file).get(WEIGHT_SUM)) is not None]
    if stated and len(files) > 1:
        raise BadInput(f"{str(batches)!r} holds {len(files)} batches, one a file: give one of them, {files[0].name!r}")
    return float(stated[0]) if stated else 1.0


def _metadata(file: Path) -> dict[bytes, bytes]:
    with _opened(file) as parquet:
        return parquet.metadata.metadata or {}


def _files(batches: Path) -> list[Path]:
    if batches.is_file():
        return [batches]
    files = sorted(batches.glob("*.parquet")) if batches.is_dir() else []
    if not files:
        raise BadInput(
            f"no batches at {str(batches)!r}: give a Parquet file or the `batches` folder that "
            "`polar-toolkit merge` writes once rewards exist"
        )
    return files


def _read_file(file: Path) -> Iterator[Row]:
    index = 0
    with _opened(file) as parquet:
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group)
            columns = {name: _column(table, name, kind, file) for name, kind in TOKEN_COLUMNS + TRAJECTORY_COLUMNS}
            for place in range(table.num_rows):
                cells = {name: column.cells(place) for name, column in columns.items()}
                yield _row(cells, f"{str(file)!r} row {index}")
                index += 1


@contextmanager
def _opened(file: Path) -> Generator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(file) as parquet:
            yield parquet
    except (pa.ArrowInvalid, OSError) as error:  # truncated, foreign or unreadable: said as one sentence
        raise BadInput(f"{str(file)!r} is not a readable Parquet file: {error}") from error


@dataclass(frozen=True, slots=True)
class _Column:
    """A list column as one flat array and the offsets of its cells."""

    values: pa.Array
    offsets: npt.NDArray[np.int64]

    def cells(self, index: int) -> pa.Array:
        """The list at a row, without copying."""
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.values.slice(start, end - start)


def _column(table: pa.Table, name: str, kind: pa.DataType, file: Path) -> _Column:
    if name not in table.column_names:
        raise BadInput(f"{str(file)!r} has no column {name!r}: it is not a batch of `polar-toolkit batch`")
    stored = table.schema.field(name).type
    listed = pa.types.is_list(stored) or pa.types.is_large_list(stored)
    if not listed or not _same_kind(stored.value_type, kind):
        raise BadInput(f"column {name!r} of {str(file)!r} is {stored}, expected list<{kind}>")
    lists = table.column(name).cast(pa.large_list(kind)).combine_chunks()
    array: pa.LargeListArray = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
    if array.null_count or (array.flatten().null_count and name != "group_ids"):
        raise BadInput(f"column {name!r} of {str(file)!r} holds nulls; every token needs a value")
    return _Column(array.values, array.offsets.to_numpy())


def _same_kind(stored: pa.DataType, expected: pa.DataType) -> bool:
    return stored == expected or (pa.types.is_large_string(stored) and pa.types.is_string(expected))


def _row(cells: dict[str, pa.Array], where: str) -> Row:
    lengths = cells["lengths"].to_numpy()
    _check_lengths(cells, lengths, where)
    mask_T = cells["loss_mask"].to_numpy()
    if not np.isin(mask_T, (0, 1)).all():
        raise BadInput(f"loss_mask of {where} holds values other than 0 and 1")
    sessions, groups = tuple(cells["session_ids"].to_pylist()), cells["group_ids"].to_pylist()
    versions: pa.DictionaryArray = cells["versions"].dictionary_encode()
    row = Row(
        input_ids_T=cells["input_ids"].to_numpy(),
        position_ids_T=cells["position_ids"].to_numpy(),
        loss_mask_T=mask_T.astype(np.bool_),
        old_logprobs_T=cells["old_logprobs"].to_numpy(),
        advantages_T=cells["advantages"].to_numpy(),
        temperature_T=cells["temperature"].to_numpy(),
        loss_weight_T=cells["loss_weight"].to_numpy(),
        lengths=lengths,
        trajectory_ids=tuple(cells["trajectory_ids"].to_pylist()),
        session_ids=sessions,
        group_ids=tuple(group or session for group, session in zip(groups, sessions, strict=True)),
        versions_T=versions.indices.to_numpy(),
        version_names=tuple(versions.dictionary.to_pylist()),
    )
    _check_layout(row, where)
    _check_numbers(row, where)
    return row


def _check_lengths(cells: dict[str, pa.Array], lengths: Int_T, where: str) -> None:
    tokens = len(cells["input_ids"])
    for name, _ in TOKEN_COLUMNS:
        if len(cells[name]) != tokens:
            raise BadInput(f"{name} of {where} has {len(cells[name])} entries, input_ids has {tokens}")
    for name, _ in TRAJECTORY_COLUMNS:
        if len(cells[name]) != len(lengths):
            raise BadInput(f"{name} of {where} has {len(cells[name])} entries, lengths has {len(lengths)}")
    if (lengths < 1).any() or int(lengths.sum()) != tokens:
        raise BadInput(
            f"lengths of {where} must be positive and add up to {tokens} tokens, they add up to {lengths.sum()}"
        )


def _check_layout(row: Row, where: str) -> None:
    starts = np.cumsum(row.lengths) - row.lengths
    expected_T = np.arange(len(row.input_ids_T)) - np.repeat(starts, row.lengths)
    if not np.array_equal(row.position_ids_T, expected_T):
        raise BadInput(f"position_ids of {where} must restart at 0 at each of its {len(row.lengths)} trajectories")
    if row.loss_mask_T[starts].any():
        raise BadInput(f"loss_mask of {where} marks the first token of a trajectory, which nothing predicts")
    if (row.input_ids_T < 0).any():
        raise BadInput(f"input_ids of {where} holds {int(row.input_ids_T.min())!r}; a token id is at least 0")


def _check_numbers(row: Row, where: str) -> None:
    off_T = ~row.loss_mask_T
    faults = {
        "old_logprobs": ~np.isfinite(row.old_logprobs_T) | (row.old_logprobs_T > 0),
        "advantages": ~np.isfinite(row.advantages_T),
        "temperature": ~np.isfinite(row.temperature_T) | (row.temperature_T <= 0),
        "loss_weight": ~np.isfinite(row.loss_weight_T) | (row.loss_weight_T < 0) | (off_T & (row.loss_weight_T != 0)),
    }
    for name, fault_T in faults.items():
        if fault_T.any():
            at = int(fault_T.argmax())
            value = float(getattr(row, f"{name}_T")[at])
            raise BadInput(f"{name} of {where} is {value!r} at token {at} (loss_mask {int(row.loss_mask_T[at])})")
