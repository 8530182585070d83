"""How far the trainer's logprobs are from the recorded ones, by how each call's prompt continued the call before it.

Invariant: what is compared is what a training step compares: the trained tokens of a batch, each once, in the tree
layout, on the float32 model, at the temperature each was sampled at. It changes no weights and writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from transformers import PreTrainedModel

from polar_toolkit.errors import Refusal
from polar_toolkit.merged import Piece, trajectory_pieces
from polar_train import passes
from polar_train.data import Float_T, Int_T, Row, stream
from polar_train.errors import BadInput, Disagreement
from polar_train.forest import Forest, Layout
from polar_train.grpo import check_vocabulary
from polar_train.model import load

ALL = "all"
"""The edge of the line that has every token."""
UNTOLD = "not told"
"""The edge of tokens whose trajectories no merged folder was given for."""


@dataclass(frozen=True, slots=True)
class Gap:
    """|logprob(trainer) - logprob(engine)| of the tokens of calls that continue another in one way, in nats."""

    edge: str
    """exact, inside(n), root(reason), or ALL."""
    tokens: int
    mean: float
    p99: float
    max: float


def measure(
    batches: Path,
    model_folder: Path,
    *,
    merged: Path | None = None,
    version: str | None = None,
    advance: Callable[[int, int], None] = lambda done, planned: None,
) -> list[Gap]:
    """The gap of each kind of edge, sorted by name, and of all tokens last.

    `batches` is batch Parquet, or a merged folder, of which all trajectories count, rewarded or not. `merged` is the
    folder whose trajectories say how calls continue each other; the one that the batches lie in unless given. Tokens
    are compared that were sampled under `version`. `advance(done, planned)` is called after every forest.

    Raises BadInput when something cannot be read or does not fit together, or when several versions sampled and none
    is named.
    """
    rows, edges = _read(batches, merged)
    wanted = _chosen(rows, version)
    kept = [one for row in rows if (one := _of_version(row, wanted)).trained]
    if not kept:
        raise BadInput(f"no trained token in {str(batches)!r}: `polar-toolkit stats` lists why each was left out")
    model = load(model_folder).eval()
    check_vocabulary(kept, model)
    forests = passes.grow(kept, model, Layout.TREE, passes.ROW_TOKENS)
    found: list[tuple[Float_T, Int_T]] = []
    for done, forest in enumerate(forests, start=1):
        found.append(_compare(model, forest))
        advance(done, len(forests))
    off_L, code_L = (np.concatenate(parts) for parts in zip(*found, strict=True))
    listed = [_gap(edges.names[code], off_L[code_L == code]) for code in np.unique(code_L).tolist()]
    return [*sorted(listed, key=lambda one: one.edge), _gap(ALL, off_L)]


def check(gaps: list[Gap], limit: float) -> None:
    """Raises Disagreement when a gap is larger than the limit, or not a number."""
    worst = max(gaps, key=lambda one: (one.max != one.max, one.max))
    if not worst.max <= limit:
        wide = [one.edge for one in gaps if not one.max <= limit and one.edge != ALL]
        raise Disagreement(
            f"trainer and engine disagree by up to {worst.max:.2e} on a token, the limit is {limit:.0e} (edges: "
            f"{', '.join(wide)}): these weights did not sample it, or the engine does not compute in float32"
        )


# --- what is compared ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Edges:
    """Which edge each token's call has, as a code: an index into `names`."""

    names: list[str]
    paths: dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]
    """By trajectory: where the sampled tokens of each of its calls begin, and the code of the call's edge."""

    def add(self, trajectory: str, starts: list[int], edges: list[str]) -> None:
        """The calls of a trajectory, root first."""
        plain = [re.sub(r"^inside\(\d+\)$", "inside(n)", edge) for edge in edges]
        self.names.extend(edge for edge in dict.fromkeys(plain) if edge not in self.names)
        codes = [self.names.index(edge) for edge in plain]
        self.paths[trajectory] = np.array(starts, np.int32), np.array(codes, np.int32)

    def codes(self, trajectory: str, length: int) -> Float_T:
        """For each token of a trajectory, the code of the call that is the last to begin at or before it."""
        if self.names == [UNTOLD]:
            return np.zeros(length, np.float32)
        if trajectory not in self.paths:
            raise BadInput(f"trajectory {trajectory!r} is not in the merged folder: give the one of this batch")
        starts, codes = self.paths[trajectory]
        at_T = np.searchsorted(starts, np.arange(length), side="right") - 1
        return codes[np.maximum(at_T, 0)].astype(np.float32)


def _read(batches: Path, merged: Path | None) -> tuple[list[Row], _Edges]:
    """The rows, with the codes of their edges in place of advantages, and what the codes mean."""
    whole = _is_merged(batches)
    folder = merged or next((place for place in (batches, *batches.parents[:2]) if _is_merged(place)), None)
    edges = _Edges([] if folder else [UNTOLD], {})
    rows: list[Row] = []
    for piece in _pieces(folder) if folder else ():
        table = piece.read(["trajectory_id", "call_starts", "edges"])
        for one in table.to_pylist():
            edges.add(one["trajectory_id"], one["call_starts"], one["edges"])
        rows += _as_rows(piece) if whole else ()
    return [_coded(row, edges) for row in (rows if whole else stream(batches))], edges


def _is_merged(folder: Path) -> bool:
    return (folder / "trajectories").is_dir()


def _pieces(folder: Path) -> list[Piece]:
    try:
        return trajectory_pieces(folder)
    except Refusal as error:  # another toolkit's folder, or none: said as one sentence
        raise BadInput(str(error)) from error


def _as_rows(piece: Piece) -> Iterator[Row]:
    """Trajectories as rows of one each. No token has an advantage or a weight."""
    table = piece.read(
        ["trajectory_id", "session_id", "group_id", "input_ids", "loss_mask", "logprobs", "versions", "temperature"]
    )
    for cells in table.to_batches(max_chunksize=1):
        column = {name: cells[name][0] for name in table.column_names}
        versions: pa.DictionaryArray = column["versions"].values
        ids_T = column["input_ids"].values.to_numpy()
        nothing_T = np.zeros(len(ids_T), np.float32)
        yield Row(
            input_ids_T=ids_T,
            position_ids_T=np.arange(len(ids_T), dtype=np.int32),
            loss_mask_T=column["loss_mask"].values.to_numpy().astype(np.bool_),
            old_logprobs_T=column["logprobs"].values.to_numpy(),
            advantages_T=nothing_T,
            temperature_T=column["temperature"].values.to_numpy(),
            loss_weight_T=nothing_T,
            lengths=np.array([len(ids_T)], np.int32),
            trajectory_ids=(column["trajectory_id"].as_py(),),
            session_ids=(column["session_id"].as_py(),),
            group_ids=(column["group_id"].as_py() or "",),
            versions_T=versions.indices.to_numpy(),
            version_names=tuple(versions.dictionary.to_pylist()),
        )


def _coded(row: Row, edges: _Edges) -> Row:
    """A forest carries each token's advantage along with it: here, the code of its edge."""
    codes = [edges.codes(name, int(size)) for name, size in zip(row.trajectory_ids, row.lengths, strict=True)]
    return replace(row, advantages_T=np.concatenate(codes))


def _chosen(rows: list[Row], version: str | None) -> str | None:
    """The version whose tokens are compared. Raises BadInput when it sampled none, or must be said."""
    seen = sorted(frozenset[str]().union(*(row.versions for row in rows)))
    if version is None and len(seen) > 1:
        raise BadInput(f"the weights {', '.join(map(repr, seen))} sampled here: say by --version which --model holds")
    if version is not None and version not in seen:
        raise BadInput(f"--version {version!r} sampled no token here; these did: {', '.join(map(repr, seen))}")
    return version


def _of_version(row: Row, version: str | None) -> Row:
    if version is None:
        return row
    codes = [code for code, name in enumerate(row.version_names) if name == version]
    return replace(row, loss_mask_T=row.loss_mask_T & np.isin(row.versions_T, codes))


# --- comparing ----------------------------------------------------------------------------------------------------


def _compare(model: PreTrainedModel, forest: Forest) -> tuple[Float_T, Int_T]:
    """|logprob(trainer) - logprob(engine)| of the L trained tokens of a forest, and the codes of their edges."""
    logprobs_T = passes.logprobs(model, forest).cpu().numpy()
    at_L = forest.loss_mask_T
    off_L = np.abs(logprobs_T[at_L] - forest.old_logprobs_T[at_L])
    return off_L, forest.advantages_T[at_L].astype(np.int32)


def _gap(edge: str, off_L: Float_T) -> Gap:
    return Gap(edge, len(off_L), float(off_L.mean()), float(np.quantile(off_L, 0.99)), float(off_L.max()))
