"""From journals to Parquet: what close and recovery leave behind."""

import asyncio
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from polar_mitm.journal import Journal, read_calls, recover
from polar_mitm.journal.packing import pack, to_table
from polar_mitm.rows import SCHEMA, SCHEMA_VERSION


def test_close_seals_and_removes_the_journal(run: Path, record: Callable[..., Any]):
    """After close there is one Parquet file with the journal's name, and no journal."""
    journal = Journal.open(run)
    record(journal, "a", "b")
    (live,) = (run / "journal").iterdir()
    journal.close_sync()
    assert [path.name for path in (run / "calls").iterdir()] == [live.stem + ".parquet"]
    assert list((run / "journal").iterdir()) == []


def test_sealed_rows_are_what_was_written_bit_for_bit(run: Path):
    """Every column of a row with odd floats comes back equal, arrays to the bit."""
    odd = np.array([-0.0, -1e-45, -np.inf, -0.1, np.float32(-87.33655)], np.float32)
    journal = Journal.open(run)
    row = journal.begin({"call_id": "a", "prompt_hash": bytes(range(16)), "request": '{"text": "\\u0000 é 🙂"}'})
    row |= {"output_ids": np.array([0, 2**31 - 1, 5, 6, 7], np.int32), "logprobs": odd, "temperature": 0.7}
    row |= {"versions": [{"start": 0, "end": 5, "version": "v1"}], "fidelity": ["store"], "status": "completed"}
    asyncio.run(journal.finish([row]))
    live = read_calls(run)
    journal.close_sync()
    sealed = read_calls(run)
    assert sealed == live
    assert sealed.to_pylist() == to_table([pack(row)]).to_pylist()
    assert sealed["logprobs"][0].values.to_numpy().tobytes() == odd.tobytes()
    assert sealed["output_ids"][0].values.to_numpy().tobytes() == row["output_ids"].tobytes()


def test_a_sealed_file_carries_its_schema_version(run: Path, record: Callable[..., Any]):
    """The version is in the file's own metadata and in every row."""
    journal = Journal.open(run)
    record(journal, "a")
    journal.close_sync()
    (path,) = (run / "calls").iterdir()
    assert pq.read_schema(path).metadata[b"schema_version"] == str(SCHEMA_VERSION).encode()
    assert pq.read_schema(path).equals(SCHEMA)
    assert read_calls(run)["schema_version"].to_pylist() == [SCHEMA_VERSION]


def test_no_rows_no_file(run: Path):
    """A journal without calls leaves nothing behind."""
    Journal.open(run).close_sync()
    assert [*(run / "journal").iterdir(), *(run / "calls").iterdir()] == []


def test_run_folders_are_private(run: Path, record: Callable[..., Any]):
    """Folders are 0700, files 0600, live and sealed: prompts hold secrets."""
    journal = Journal.open(run)
    record(journal, "a")
    modes = [path.stat().st_mode & 0o777 for path in (run, run / "journal", run / "calls")]
    files = [*(run / "journal").iterdir()]
    modes += [path.stat().st_mode & 0o777 for path in files]
    journal.close_sync()
    modes += [path.stat().st_mode & 0o777 for path in (run / "calls").iterdir()]
    assert modes == [0o700, 0o700, 0o700, 0o600, 0o600]


def test_the_next_start_seals_what_a_dead_writer_left(
    run: Path, tmp_path: Path, record: Callable[..., Any], orphan: Callable[..., Path], journal: Journal
):
    """Finished calls are sealed as they were, unfinished ones as lost, and a half-made file is replaced."""
    journal.begin({"call_id": "unfinished", "session_id": "s"})
    record(journal, "a")
    path = orphan(run, tmp_path / "copy")
    (tmp_path / "copy" / "calls" / f"{path.stem}.tmp").write_bytes(b"half")
    before = read_calls(tmp_path / "copy")
    Journal.open(tmp_path / "copy").close_sync()
    assert read_calls(tmp_path / "copy") == before
    assert before.select(["call_id", "status", "trainable", "untrainable_reason", "session_id"]).to_pylist() == [
        {
            "call_id": "unfinished",
            "status": "lost",
            "trainable": False,
            "untrainable_reason": "lost",
            "session_id": "s",
        },
        {"call_id": "a", "status": "completed", "trainable": True, "untrainable_reason": None, "session_id": None},
    ]
    assert [entry.name for entry in (tmp_path / "copy" / "calls").iterdir()] == [f"{path.stem}.parquet"]


def test_recovery_leaves_a_living_writer_alone(journal: Journal, run: Path, record: Callable[..., Any]):
    """A locked journal is neither sealed nor removed, and its writer goes on."""
    record(journal, "a")
    assert recover(run) == 0
    record(journal, "b")
    assert read_calls(run)["call_id"].to_pylist() == ["a", "b"]
    assert list((run / "calls").iterdir()) == []


def test_a_journal_stays_when_its_parquet_cannot_be_written(
    run: Path, tmp_path: Path, record: Callable[..., Any], orphan: Callable[..., Path], journal: Journal
):
    """A failed seal removes nothing, and the next recovery succeeds."""
    record(journal, "a")
    path = orphan(run, tmp_path / "copy")
    blocker = tmp_path / "copy" / "calls" / f"{path.stem}.tmp"
    blocker.mkdir()
    with pytest.raises(IsADirectoryError):
        recover(tmp_path / "copy")
    assert read_calls(tmp_path / "copy")["call_id"].to_pylist() == ["a"]
    blocker.rmdir()
    assert recover(tmp_path / "copy") == 1
    assert read_calls(tmp_path / "copy")["call_id"].to_pylist() == ["a"]


def test_a_torn_journal_is_kept_aside(
    run: Path,
    tmp_path: Path,
    record: Callable[..., Any],
    orphan: Callable[..., Path],
    journal: Journal,
    caplog: pytest.LogCaptureFixture,
):
    """Bytes behind the last valid record are reported and kept, never dropped in silence."""
    record(journal, "a")
    path = orphan(run, tmp_path / "copy")
    path.write_bytes(path.read_bytes() + b"torn")
    with caplog.at_level(logging.WARNING):
        assert recover(tmp_path / "copy") == 1
    assert "4 bytes behind the last valid record" in caplog.text
    assert read_calls(tmp_path / "copy")["call_id"].to_pylist() == ["a"]
    assert [entry.name for entry in (tmp_path / "copy" / "journal").iterdir()] == [f"{path.stem}.torn"]
    assert recover(tmp_path / "copy") == 0


def test_the_lock_is_held_from_the_first_moment_a_journal_can_be_seen(journal: Journal, run: Path):
    """A journal with a living writer cannot be locked by anyone else."""
    (path,) = (run / "journal").iterdir()
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    os.close(descriptor)
