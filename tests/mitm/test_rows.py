"""The calls table: its types, and whole prompts from suffixes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.journal.packing import pack, to_table
from polar_mitm.rows import COLUMNS, SCHEMA, full_prompts, token_hash

Row = dict[str, Any]


def call(name: str, suffix: list[int], output: list[int], parent: str | None = None, shared: int = 0) -> Row:
    return {
        "call_id": name, "choice": 0, "parent_call_id": parent, "parent_choice": None if parent is None else 0,
        "prompt_shared": shared, "prompt_suffix": np.array(suffix, np.int32), "output_ids": np.array(output, np.int32),
    }  # fmt: skip


def table(*rows: Row) -> pa.Table:
    return to_table(pack(row) for row in rows)


def prompts(*rows: Row) -> dict[str, list[int]]:
    return {name: ids.tolist() for (name, _), ids in full_prompts(table(*rows)).items()}


def test_every_column_says_what_it_means() -> None:
    """docs/dataset.md is made from these sentences."""
    assert all(meaning for _, _, meaning in COLUMNS)
    assert len({name for name, _, _ in COLUMNS}) == len(COLUMNS)


def test_the_hash_of_a_prompt_does_not_depend_on_its_memory() -> None:
    """blake2b-16 of little-endian int32, whatever the array's type and strides."""
    ids = np.arange(10, dtype=np.int32)
    assert len(token_hash(ids)) == 16
    assert token_hash(ids) == token_hash(ids.astype(np.int64)) == token_hash(np.repeat(ids, 2)[::2])  # pyright: ignore[reportArgumentType] - on purpose
    assert token_hash(ids) != token_hash(ids[:-1])


def test_a_chain_is_put_together() -> None:
    """A prompt is its parent's prompt, its parent's output, and the suffix."""
    rows = (
        call("one", [1, 2], [3]),
        call("two", [4], [5, 6], "one", shared=3),
        call("three", [7], [8], "two", shared=6),
    )
    assert prompts(*rows) == {"one": [1, 2], "two": [1, 2, 3, 4], "three": [1, 2, 3, 4, 5, 6, 7]}


def test_the_order_of_the_rows_does_not_matter() -> None:
    """A child may stand before its parent."""
    rows = (call("two", [4], [5], "one", shared=3), call("one", [1, 2], [3]))
    assert prompts(*rows)["two"] == [1, 2, 3, 4]


def test_a_fork_shares_its_parent() -> None:
    """Two calls may continue one."""
    rows = (
        call("one", [1], [2]),
        call("left", [3], [], "one", shared=2),
        call("right", [4], [], "one", shared=2),
    )
    assert prompts(*rows) == {"one": [1], "left": [1, 2, 3], "right": [1, 2, 4]}


def test_a_call_may_share_less_than_all_of_its_parent() -> None:
    """prompt_shared says how much of the parent's prompt and output is taken."""
    assert prompts(call("one", [1, 2], [3, 4]), call("two", [9], [], "one", shared=3))["two"] == [1, 2, 3, 9]


def test_a_call_without_its_parent_has_no_prompt() -> None:
    """What cannot be known is not guessed; nor is what hangs on it."""
    rows = (call("two", [4], [5], "gone", shared=3), call("three", [6], [], "two", shared=5), call("one", [1], []))
    assert prompts(*rows) == {"one": [1]}


def test_a_call_that_never_had_a_prompt_is_empty() -> None:
    """A refused request is a root with no tokens."""
    assert prompts({"call_id": "one", "choice": 0})["one"] == []


@pytest.mark.parametrize("missing", [False, True], ids=["with its root", "without its root"])
def test_a_session_of_thousands_of_calls_needs_no_recursion(*, missing: bool) -> None:
    """3,000 turns, the last one first in the table, in a few seconds."""
    rows = [call(str(i), [i], [i], str(i - 1) if i else None, shared=2 * i) for i in range(3_000)]
    kept = [field for field in SCHEMA if field.name in rows[0]]
    chain = pa.Table.from_pylist(rows[:0:-1] if missing else rows[::-1], schema=pa.schema(kept))
    began = time.process_time()
    found = full_prompts(chain)
    assert time.process_time() - began < 5
    assert len(found) == (0 if missing else 3_000)
    if not missing:
        assert found["2999", 0].tolist() == [i for i in range(3_000) for _ in range(2)][:-1]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_any_tree_of_calls_gives_the_prompts_that_made_it(shape: list[tuple[int, int, int]]) -> None:
    """full_prompts undoes the splitting of prompts into parent and suffix."""
    whole: dict[str, list[int]] = {}
    rows: list[Row] = []
    for index, (above, fresh, sampled) in enumerate(shape):
        parent = rows[above] if above < len(rows) else None
        known = whole[parent["call_id"]] + parent["output_ids"].tolist() if parent else []
        new, output = [index * 10 + i for i in range(fresh)], [index * 10 + 5 + i for i in range(sampled)]
        rows.append(call(str(index), new, output, parent["call_id"] if parent else None, shared=len(known)))
        whole[str(index)] = known + new
    assert prompts(*rows) == whole
