"""Paths from root to leaf as flat token arrays, each sampled token trained at exactly one of its places.

Invariant: over the trajectories of a session the loss masks add up to the trainable sampled tokens, none is counted
twice, and each stands behind the very tokens it was sampled behind. Rewards and lengths limits come later (batches.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from polar_toolkit.calls import Call, Float32s, Int32s, SessionKey
from polar_toolkit.tree import Forest, Node

SCHEMA_VERSION = 2
SCHEMA = pa.schema(
    [
        pa.field("schema_version", pa.int32()),
        pa.field("trajectory_id", pa.string()),
        pa.field("run_id", pa.string()),
        pa.field("session_id", pa.string()),
        pa.field("group_id", pa.string()),
        pa.field("kind", pa.string()),
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.uint8())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("versions", pa.list_(pa.dictionary(pa.int32(), pa.string()))),  # plain strings in files (merged.py)
        pa.field("temperature", pa.list_(pa.float32())),
        pa.field("call_ids", pa.list_(pa.string())),
        pa.field("call_starts", pa.list_(pa.int32())),
        pa.field("edges", pa.list_(pa.string())),
        pa.field("reward", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One path of calls. The arrays have one element a token."""

    trajectory_id: str
    session: SessionKey
    group_id: str | None
    kind: str
    """Kind of the last call."""
    input_ids: Int32s
    loss_mask: npt.NDArray[np.uint8]
    """1 where a sampled token is trained here; 0 on context and on tokens that another trajectory trains."""
    logprobs: Float32s
    """Of the sampled token under its temperature; 0 off the mask."""
    versions: npt.NDArray[np.int32]
    """Index into `version_names`; 0 off the mask."""
    version_names: tuple[str, ...]
    """The first is '', for tokens off the mask."""
    temperature: Float32s
    """1 off the mask."""
    call_ids: tuple[str, ...]
    call_starts: tuple[int, ...]
    """Where the tokens that each call sampled begin."""
    edges: tuple[str, ...]
    """How each call continues the one before it: exact, inside(n), or root(reason) for the first."""


def build(forest: Forest) -> list[Trajectory]:
    """The trajectories of a session, in order of their last call.

    A path ends at its last trainable call. A token on several paths is trained on the one that ends first.
    """
    owned = [0] * len(forest.nodes)
    built = [_trajectory(forest, leaf, owned) for leaf in _leaves(forest.nodes)]
    trainable = sum(len(node.call.output_ids) for node in forest.nodes if node.trained)
    trained = sum(int(trajectory.loss_mask.sum()) for trajectory in built)
    if trained != trainable or sum(owned) != trainable:
        raise RuntimeError(f"session {forest.session!r}: {trained} tokens trained of {trainable} trainable ones")
    return built


def to_table(trajectories: Sequence[Trajectory], rewards: Mapping[SessionKey, float]) -> pa.Table:
    """Trajectories as a table of SCHEMA; `reward` is null where `rewards` has none for the session."""
    columns: dict[str, pa.Array] = {
        "schema_version": pa.array([SCHEMA_VERSION] * len(trajectories), pa.int32()),
        "trajectory_id": pa.array([t.trajectory_id for t in trajectories], pa.string()),
        "run_id": pa.array([t.session[0] for t in trajectories], pa.string()),
        "session_id": pa.array([t.session[1] for t in trajectories], pa.string()),
        "group_id": pa.array([t.group_id for t in trajectories], pa.string()),
        "kind": pa.array([t.kind for t in trajectories], pa.string()),
        "input_ids": list_column([t.input_ids for t in trajectories], pa.int32()),
        "loss_mask": list_column([t.loss_mask for t in trajectories], pa.uint8()),
        "logprobs": list_column([t.logprobs for t in trajectories], pa.float32()),
        "versions": _version_column(trajectories),
        "temperature": list_column([t.temperature for t in trajectories], pa.float32()),
        "call_ids": pa.array([t.call_ids for t in trajectories], pa.list_(pa.string())),
        "call_starts": pa.array([t.call_starts for t in trajectories], pa.list_(pa.int32())),
        "edges": pa.array([t.edges for t in trajectories], pa.list_(pa.string())),
        "reward": pa.array([rewards.get(t.session) for t in trajectories], pa.float64()),
    }
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def with_rewards(table: pa.Table, rewards: Mapping[SessionKey, float]) -> pa.Table:
    """The same trajectories with the rewards that hold now."""
    sessions = zip(table["run_id"].to_pylist(), table["session_id"].to_pylist(), strict=True)
    column = pa.array([rewards.get(session) for session in sessions], pa.float64())
    return table.set_column(SCHEMA.get_field_index("reward"), SCHEMA.field("reward"), column)


def list_column(arrays: Sequence[npt.NDArray[np.generic]], kind: pa.DataType) -> pa.ListArray:
    """Numpy arrays as one list column, in a single copy."""
    values = np.concatenate(arrays) if arrays else np.empty(0, kind.to_pandas_dtype())
    return pa.ListArray.from_arrays(_offsets(arrays), pa.array(values, type=kind))


def _offsets(arrays: Sequence[npt.NDArray[np.generic]]) -> pa.Array:
    return pa.array(np.cumsum([0, *(len(array) for array in arrays)]), pa.int32())


def _version_column(trajectories: Sequence[Trajectory]) -> pa.ListArray:
    names = sorted({name for t in trajectories for name in t.version_names})
    codes = [np.array([names.index(name) for name in t.version_names], np.int32)[t.versions] for t in trajectories]
    flat = np.concatenate(codes) if codes else np.empty(0, np.int32)
    values = pa.DictionaryArray.from_arrays(pa.array(flat), pa.array(names, pa.string()))
    return pa.ListArray.from_arrays(_offsets(codes), values)


def _leaves(nodes: Sequence[Node]) -> list[int]:
    """Trainable nodes whose whole output is on no longer path to a trainable node."""
    leads = [node.trained for node in nodes]
    covered = [False] * len(nodes)
    for index in sorted(range(len(nodes)), key=lambda i: -nodes[i].call.prompt_len):  # children before parents
        node = nodes[index]
        if node.parent >= 0 and leads[index]:
            leads[node.parent] = True
            covered[node.parent] = covered[node.parent] or node.whole
    return [index for index, node in enumerate(nodes) if node.trained and not covered[index]]


def _trajectory(forest: Forest, leaf: int, owned: list[int]) -> Trajectory:
    """The path to `leaf`; `owned[i]` counts the leading output tokens of node i that already have a place."""
    nodes, path = forest.nodes, _path(forest.nodes, leaf)
    names: dict[str, int] = {"": 0}
    last = nodes[leaf].call
    out = _Arrays.empty(last.tip_len)
    for position, index in enumerate(path):
        node = nodes[index]
        out.input_ids[node.shared : node.call.prompt_len] = node.suffix
        end = nodes[path[position + 1]].shared if index != leaf else last.tip_len
        taken = end - node.call.prompt_len
        out.input_ids[node.call.prompt_len : end] = node.call.output_ids[:taken]
        if node.trained and taken > owned[index]:
            out.train(node.call, owned[index], taken, names)
            owned[index] = taken
    return Trajectory(
        trajectory_id=f"{last.call_id}.{last.choice}",
        session=forest.session,
        group_id=forest.group_id,
        kind=last.kind,
        input_ids=out.input_ids,
        loss_mask=out.loss_mask,
        logprobs=out.logprobs,
        versions=out.versions,
        version_names=tuple(names),
        temperature=out.temperature,
        call_ids=tuple(nodes[index].call.call_id for index in path),
        call_starts=tuple(nodes[index].call.prompt_len for index in path),
        edges=tuple(nodes[index].edge for index in path),
    )


def _path(nodes: Sequence[Node], leaf: int) -> list[int]:
    path: list[int] = []
    while leaf >= 0:
        path.append(leaf)
        leaf = nodes[leaf].parent
    return path[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class _Arrays:
    input_ids: Int32s
    loss_mask: npt.NDArray[np.uint8]
    logprobs: Float32s
    versions: npt.NDArray[np.int32]
    temperature: Float32s

    @classmethod
    def empty(cls, length: int) -> _Arrays:
        return cls(
            np.empty(length, np.int32),
            np.zeros(length, np.uint8),
            np.zeros(length, np.float32),
            np.zeros(length, np.int32),
            np.ones(length, np.float32),
        )

    def train(self, call: Call, start: int, end: int, names: dict[str, int]) -> None:
        """Put output tokens [start, end) of a call on the mask."""
        here = slice(call.prompt_len + start, call.prompt_len + end)
        self.loss_mask[here] = 1
        self.logprobs[here] = call.logprobs[start:end]
        self.temperature[here] = call.temperature
        self.versions[here] = names.setdefault("unknown", len(names))
        for first, last, name in call.versions:
            code = names.setdefault(name, len(names))
            low, high = max(first, start), min(last, end)
            self.versions[call.prompt_len + low : call.prompt_len + max(low, high)] = code
