"""The writer: group commit, failures, kill -9."""

import asyncio
import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar_mitm.errors import JournalError
from polar_mitm.journal import FileSink, Journal, read_calls

Row = dict[str, Any]


class Watched(FileSink):
    """Notes what happens to the file and which thread syncs it, and holds every fsync until `go` is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.events: list[str] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()
        self.asked = threading.Event()

    def write(self, data: bytes, /) -> None:
        super().write(data)
        self.events.append("write")

    def fsync(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.asked.set()
        assert self.go.wait(60)
        super().fsync()
        self.events.append("fsync")


class Failing(FileSink):
    """Fails at the operation that `fail` names: fsync, write, or half a write."""

    fail = ""

    def write(self, data: bytes, /) -> None:
        if self.fail == "half":
            super().write(data[: len(data) // 2])
        if self.fail in ("write", "half"):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(data)

    def fsync(self) -> None:
        if self.fail == "fsync":
            raise OSError(errno.EIO, "Input/output error")
        super().fsync()


def open_with[S: FileSink](run: Path, kind: type[S]) -> tuple[Journal, S]:
    sinks: list[S] = []

    def make(path: Path) -> S:
        sinks.append(kind(path))
        return sinks[-1]

    return Journal.open(run, sink=make), sinks[0]


def test_finish_returns_after_the_fsync_of_its_rows(run: Path, completed: Callable[..., Row]):
    """Neither the write nor anything before the end of fsync lets finish return."""
    journal, sink = open_with(run, Watched)

    async def main() -> None:
        sink.events.clear()
        sink.go.clear()
        sink.asked.clear()
        task = asyncio.create_task(journal.finish([completed(journal.begin({"call_id": "a"}))]))
        await asyncio.to_thread(sink.asked.wait, 60)
        assert not task.done()
        assert set(sink.events) == {"write"}
        sink.go.set()
        await task
        assert sink.events[-1] == "fsync"

    asyncio.run(main())
    journal.close_sync()


def test_finishes_that_wait_share_an_fsync(run: Path, completed: Callable[..., Row]):
    """64 calls that finish while one is being synced cost one more fsync, not 64."""
    journal, sink = open_with(run, Watched)

    async def main() -> None:
        rows = [completed(journal.begin({"call_id": str(n)})) for n in range(65)]
        sink.go.clear()
        sink.asked.clear()
        tasks = [asyncio.create_task(journal.finish(rows[:1]))]
        await asyncio.to_thread(sink.asked.wait, 60)
        tasks += [asyncio.create_task(journal.finish([row])) for row in rows[1:]]
        await asyncio.sleep(0)  # each task runs up to its wait
        sink.events.clear()
        sink.go.set()
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert sink.events == ["fsync", "write", "fsync"]
    journal.close_sync()
    assert len(read_calls(run)) == 65


def test_the_caller_waits_for_no_disk(run: Path, record: Callable[..., Any]):
    """All fsyncs after opening happen on the writer thread."""
    journal, sink = open_with(run, Watched)
    sink.threads.clear()
    record(journal, "a", "b")
    assert sink.threads == {"journal-writer"}
    journal.close_sync()


def test_a_begun_call_leaves_a_trace_while_another_is_being_synced(run: Path, completed: Callable[..., Row]):
    """Its record is in the file when `begin` returns: the engine is not asked before that."""
    journal, sink = open_with(run, Watched)

    async def main() -> None:
        row = completed(journal.begin({"call_id": "a"}))
        sink.go.clear()
        sink.asked.clear()
        task = asyncio.create_task(journal.finish([row]))
        await asyncio.to_thread(sink.asked.wait, 60)
        sink.events.clear()
        journal.begin({"call_id": "b"})
        assert sink.events == ["write"]
        sink.go.set()
        await task

    asyncio.run(main())
    journal.close_sync()
    assert read_calls(run)["status"].to_pylist() == ["completed", "lost"]


def test_begin_alone_reaches_the_file_without_an_fsync(run: Path):
    """A begun call is written promptly, and nobody waits for the disk."""
    journal, sink = open_with(run, Watched)
    sink.events.clear()
    row = journal.begin({"call_id": "a"})
    journal.close_sync()
    assert sink.events == ["write"]
    assert (row["status"], row["sequence"], row["writer"]) == ("lost", 0, journal.writer)
    assert read_calls(run).select(["call_id", "status"]).to_pylist() == [{"call_id": "a", "status": "lost"}]


def test_every_choice_of_a_call_leaves_a_trace(run: Path):
    """One that is not finished is lost, the finished one beside it is not."""
    journal = Journal.open(run)
    rows = [journal.begin({"call_id": "a", "choice": choice}) for choice in range(3)]
    asyncio.run(journal.finish([rows[1] | {"status": "completed"}]))
    journal.close_sync()
    read = read_calls(run).select(["choice", "status"]).to_pylist()
    assert [(row["choice"], row["status"]) for row in read] == [(0, "lost"), (1, "completed"), (2, "lost")]


@pytest.mark.parametrize("operation", ["fsync", "write", "half"])
def test_a_failed_disk_is_a_journal_error_for_this_call_and_all_later_ones(
    run: Path, operation: str, completed: Callable[..., Row], record: Callable[..., Any]
):
    """What could not be made durable is not acknowledged, even when the disk works again later."""
    journal, sink = open_with(run, Failing)
    record(journal, "good")
    row = completed(journal.begin({"call_id": "bad"}))
    record(journal, "another")
    sink.fail = operation
    with pytest.raises(JournalError, match="cannot write"):
        asyncio.run(journal.finish([row]))
    sink.fail = ""
    with pytest.raises(JournalError, match="mend the disk"):
        asyncio.run(journal.finish([row]))
    with pytest.raises(JournalError):
        journal.begin({"call_id": "later"})
    with pytest.raises(JournalError):
        journal.close_sync()
    calls = dict(zip(*read_calls(run).select(["call_id", "status"]).to_pydict().values(), strict=True))
    assert calls["good"] == calls["another"] == "completed"
    assert calls["bad"] == ("completed" if operation == "fsync" else "lost")


def test_a_broken_journal_is_sealed_by_the_next_start(run: Path, record: Callable[..., Any]):
    """What was acknowledged before the disk failed is in Parquet after a restart."""
    journal, sink = open_with(run, Failing)
    record(journal, "good")
    sink.fail = "half"
    with pytest.raises(JournalError):
        record(journal, "bad")
    with pytest.raises(JournalError):
        journal.close_sync()
    Journal.open(run).close_sync()
    assert "good" in read_calls(run)["call_id"].to_pylist()
    assert len(list((run / "calls").iterdir())) == 1


def test_a_cancelled_finish_keeps_its_rows(run: Path, completed: Callable[..., Row]):
    """A client that leaves while its call is being synced does not unwrite the call, nor break the journal."""
    journal, sink = open_with(run, Watched)

    async def main() -> None:
        first, second = (completed(journal.begin({"call_id": name})) for name in "ab")
        sink.go.clear()
        sink.asked.clear()
        task = asyncio.create_task(journal.finish([first]))
        await asyncio.to_thread(sink.asked.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        sink.go.set()
        await journal.finish([second])

    asyncio.run(main())
    journal.close_sync()
    assert read_calls(run)["status"].to_pylist() == ["completed", "completed"]


def test_any_event_loop_may_finish(run: Path, completed: Callable[..., Row]):
    """A journal opened on one thread serves loops on others, also one that is closed while its row is synced."""
    journal, sink = open_with(run, Watched)
    rows = [completed(journal.begin({"call_id": str(n)})) for n in range(3)]
    threads = [threading.Thread(target=lambda row=row: asyncio.run(journal.finish([row]))) for row in rows[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def leave() -> None:
        sink.go.clear()
        sink.asked.clear()
        task = asyncio.create_task(journal.finish(rows[2:]))
        await asyncio.to_thread(sink.asked.wait, 60)
        task.cancel()

    asyncio.run(leave())
    sink.go.set()
    asyncio.run(journal.close())
    assert read_calls(run)["status"].to_pylist() == ["completed"] * 3


def test_two_writers_share_a_run(run: Path, record: Callable[..., Any]):
    """Each has a journal and an order of its own."""
    one, other = Journal.open(run), Journal.open(run)
    record(one, "a", "b")
    record(other, "c")
    record(one, "d")
    assert sorted(read_calls(run)["call_id"].to_pylist()) == ["a", "b", "c", "d"]
    one.close_sync()
    record(other, "e")
    other.close_sync()
    calls = read_calls(run)
    order: dict[str, list[str]] = {one.writer: [], other.writer: []}
    for writer, call_id in zip(calls["writer"].to_pylist(), calls["call_id"].to_pylist(), strict=True):
        order[writer].append(call_id)
    assert order == {one.writer: ["a", "b", "d"], other.writer: ["c", "e"]}
    assert calls["writer"].to_pylist() == sorted(calls["writer"].to_pylist())


def test_a_row_that_did_not_begin_here_is_refused(journal: Journal):
    """finish completes what begin stamped."""
    with pytest.raises(ValueError, match="call 'a' did not begin here"):
        asyncio.run(journal.finish([{"call_id": "a"}]))


def test_an_unknown_column_is_refused_at_once(journal: Journal, run: Path, record: Callable[..., Any]):
    """A wrong name is the caller's error and leaves the journal whole."""
    with pytest.raises(KeyError, match="colour"):
        journal.begin({"call_id": "a", "colour": "red"})
    record(journal, "b")
    assert read_calls(run)["call_id"].to_pylist() == ["b"]


def test_a_wrong_value_is_refused_at_once(journal: Journal, run: Path, completed: Callable[..., Row]):
    """Not when it is sealed, where it would hold up the rows around it; the call can still be finished."""
    row = completed(journal.begin({"call_id": "a"}))
    for wrong in ({"prompt_len": 1 << 31}, {"prompt_hash": b"short"}, {"reply": 1}, {"trainable": "yes"}):
        with pytest.raises(TypeError, match=f"column {next(iter(wrong))} holds"):
            asyncio.run(journal.finish([row | wrong]))
    asyncio.run(journal.finish([row]))
    assert read_calls(run)["status"].to_pylist() == ["completed"]


def test_an_amended_row_waits_for_no_disk(run: Path, completed: Callable[..., Row]):
    """It is written promptly, replaces the finished one, and leaves the fsync to the next finish."""
    journal, sink = open_with(run, Watched)
    row = completed(journal.begin({"call_id": "a"}))
    asyncio.run(journal.finish([row]))
    sink.events.clear()
    journal.amend([row | {"client_delivered": True}])
    journal.close_sync()
    assert sink.events == ["write"]
    assert read_calls(run)["client_delivered"].to_pylist() == [True]


def test_a_closed_journal_takes_nothing(run: Path):
    """After close, begin says so, and closing again does nothing."""
    journal = Journal.open(run)
    journal.close_sync()
    journal.close_sync()
    with pytest.raises(JournalError, match="is closed"):
        journal.begin({"call_id": "a"})


def test_a_thread_outlives_the_main_thread(run: Path):
    """Calls that other threads finish while the interpreter ends are answered, rotation included."""
    program = """
import asyncio, pathlib, sys, threading
from polar_mitm.journal import Journal

journal = Journal.open(pathlib.Path(sys.argv[1]), rotate_bytes=1)

async def calls():
    for number in range(20):
        await journal.finish([journal.begin({"call_id": str(number)}) | {"status": "completed"}])

def work():
    threading.main_thread().join()
    asyncio.run(calls())

threading.Thread(target=work).start()
"""
    ended = subprocess.run([sys.executable, "-c", program, str(run)], timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert read_calls(run)["status"].to_pylist() == ["completed"] * 20


WRITER = """
import asyncio, pathlib, sys
from polar_mitm.journal import Journal

async def main(run, prefix, rotate_bytes):
    journal = Journal.open(run, rotate_bytes=rotate_bytes)
    print("open", flush=True)
    for number in range(100_000):
        journal.begin({"call_id": f"{prefix}-lost-{number}"})
        row = journal.begin({"call_id": f"{prefix}-done-{number}"})
        await journal.finish([row | {"status": "completed", "output_ids": [number], "logprobs": [-0.5]}])
        print(number, flush=True)

asyncio.run(main(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.parametrize("rotate_bytes", [1 << 20, 4000])
def test_kill_9_loses_no_acknowledged_call(run: Path, rotate_bytes: int):
    """Killed at any moment, also between parts: what was acknowledged is there, what was begun before it is lost."""
    expected: dict[str, str] = {}
    for kill, lines in enumerate([1, 2, 3, 9, 24, 60]):
        command = [sys.executable, "-c", WRITER, str(run), str(kill), str(rotate_bytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout
            for _ in range(lines):
                writer.stdout.readline()
            writer.kill()
            acknowledged = max(lines - 1, 0) + len(writer.stdout.readlines())
        for number in range(acknowledged):
            expected |= {f"{kill}-lost-{number}": "lost", f"{kill}-done-{number}": "completed"}
        calls = read_calls(run).select(["call_id", "status"]).to_pydict()
        assert len(calls["call_id"]) == len(set(calls["call_id"]))
        statuses = dict(zip(calls["call_id"], calls["status"], strict=True))
        assert {call_id: statuses.get(call_id) for call_id in expected} == expected
    before = read_calls(run)
    Journal.open(run).close_sync()
    assert read_calls(run) == before
