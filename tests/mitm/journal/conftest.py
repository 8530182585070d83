"""What the journal's tests share: rows, runs of a few calls, and journals whose writer is gone."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_mitm.journal import Journal

Row = dict[str, Any]


def completed(begun: Row, tokens: int = 3) -> Row:
    rng = np.random.default_rng(begun["sequence"])
    return begun | {
        "status": "completed",
        "trainable": True,
        "untrainable_reason": None,
        "output_ids": rng.integers(0, 150_000, tokens, dtype=np.int32),
        "logprobs": -rng.exponential(1, tokens).astype(np.float32),
    }


def record(journal: Journal, *call_ids: str) -> list[Row]:
    """Begin and finish calls, one after the other; returns the rows."""

    async def run() -> list[Row]:
        rows: list[Row] = []
        for call_id in call_ids:
            rows.append(completed(journal.begin({"call_id": call_id})))
            await journal.finish(rows[-1:])
        return rows

    return asyncio.run(run())


def journals(run: Path) -> list[Path]:
    return sorted((run / "journal").glob("*.journal"))


def orphan(run: Path, to: Path) -> Path:
    """A copy of the run whose one journal has no living writer, as after kill -9; returns that journal."""
    shutil.copytree(run, to)
    (journal,) = journals(to)
    return journal


@pytest.fixture(name="completed")
def _completed() -> Callable[..., Row]:
    return completed


@pytest.fixture(name="record")
def _record() -> Callable[..., list[Row]]:
    return record


@pytest.fixture(name="orphan")
def _orphan() -> Callable[[Path, Path], Path]:
    return orphan


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def journal(run: Path) -> Iterator[Journal]:
    with_file = Journal.open(run)
    yield with_file
    with_file.close_sync()
