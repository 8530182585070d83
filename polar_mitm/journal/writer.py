"""The journal of one process: a thread that commits what queued up and waits for the disk, off the event loop.

Invariant: `finish` returns after the fsync that covers its rows, or raises; after one failed write or fsync nothing
is acknowledged any more, because the kernel may have dropped the pages that a later fsync would call durable.
Each part's file has its name only while it is whole at the head and locked. This module reads nothing back.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, Self

import zstandard

from polar_mitm.errors import JournalError
from polar_mitm.journal.frames import BEGUN, FINISHED, Record, head, record
from polar_mitm.journal.packing import Row
from polar_mitm.journal.sealing import recover, seal, sync_folder
from polar_mitm.rows import SCHEMA_VERSION

ROTATE_BYTES = 256 << 20
"""Size at which a part is sealed and the next begun."""


class Sink(Protocol):
    """Where the bytes of a journal go. Each method raises OSError when it could not do the whole of its work."""

    def write(self, data: bytes, /) -> None:
        """Append all of `data`."""
        ...

    def fsync(self) -> None:
        """Return when everything written so far is on stable storage."""
        ...

    def close(self) -> None:
        """Give the file back."""
        ...


class FileSink:
    """A Sink that appends to an existing file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(self, data: bytes, /) -> None:
        """Append all of `data`, in as many writes as the kernel wants."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def fsync(self) -> None:
        """Flush the file to the disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._file)


class Journal:
    """The journal of this process in one run folder. Any thread and any event loop may call it."""

    def __init__(self, run: Path, *, sink: Callable[[Path], Sink], rotate_bytes: int) -> None:
        started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        self.writer = f"{started}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        """Unique name of this journal, and the `writer` column of its rows; sorts by the time it was opened."""
        self._folder = run / "journal"
        self._sink = sink
        self._rotate_bytes = rotate_bytes
        self._sequence = count()
        self._numbers = count(1)
        self._unfinished: dict[tuple[str, int], bytes] = {}  # frames of begun calls, to carry into the next part
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # None ends the writer thread
        self._compress = zstandard.ZstdCompressor(level=1).compress
        self._gate = threading.Lock()  # nothing enters the queue behind its None
        self._writing = threading.Lock()  # of the part, the compressor and the unfinished calls; not held while syncing
        self._closed = False
        self._broken = ""  # why nothing can be written any more
        self._sealer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal-sealer")
        self._sealed: list[Future[None]] = []
        self._part = self._next_part()
        self._thread = threading.Thread(target=self._serve, name="journal-writer", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, run: Path, *, sink: Callable[[Path], Sink] = FileSink, rotate_bytes: int = ROTATE_BYTES) -> Self:
        """Make the run's folders (0700), seal what dead writers left, and start a journal of our own.

        Raises OSError when the folder cannot be written and UnreadableRun when a journal in it is not ours.
        """
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("journal", "calls"):
            (run / name).mkdir(mode=0o700, exist_ok=True)
        sync_folder(run)
        sync_folder(run.parent)
        recover(run)
        return cls(run, sink=sink, rotate_bytes=rotate_bytes)

    def begin(self, row: Row) -> Row:
        """Take a choice of a call before the engine is asked; returns the stamped row, to be completed for `finish`.

        The record is written, not synced, when this returns: a process that is killed then leaves a trace of the call.
        Raises JournalError when the journal is broken or closed, KeyError without call_id or for a name that is no
        column.
        """
        stamped = {"choice": 0, **row, "schema_version": SCHEMA_VERSION, "writer": self.writer}
        stamped |= {"sequence": next(self._sequence), "status": "lost"}
        stamped |= {"trainable": False, "untrainable_reason": "lost"}
        taken = record(BEGUN, stamped)
        with self._gate:
            self._check_open()
            with self._writing:
                self._write([taken])
        self._check_open()
        return stamped

    async def finish(self, rows: Sequence[Row]) -> None:
        """Return when `rows`, choices of calls that began here, are on stable storage.

        A later row of a (call_id, choice) replaces the earlier one. A caller that is cancelled does not take its
        rows back. Raises JournalError when a write or fsync failed, now or earlier, and ValueError for a row that
        `begin` did not stamp.
        """
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._put(_Job(self._finished(rows), done))
        await asyncio.wrap_future(done)

    def amend(self, rows: Sequence[Row]) -> None:
        """Take later rows of finished choices, which replace the earlier ones; nobody waits for the disk.

        They are on their way when this returns, and on stable storage with the next `finish` or `close`. Raises as
        `finish`; the next call is told of a write that fails later.
        """
        self._put(_Job(self._finished(rows)))

    def _finished(self, rows: Sequence[Row]) -> tuple[Record, ...]:
        for row in rows:
            if row.get("writer") != self.writer:
                raise ValueError(f"call {row.get('call_id')!r} did not begin here: complete the row from begin()")
        return tuple(record(FINISHED, row) for row in rows)

    async def flush(self) -> None:
        """Return when every call that is finished so far is in `calls/`; the journal goes on in a new part.

        Raises JournalError when it is broken or closed, or when a part cannot be sealed.
        """
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        self._put(_Job((), done, seals=True))
        await asyncio.wrap_future(done)
        try:
            await asyncio.gather(*map(asyncio.wrap_future, self._sealed))
        except OSError as error:
            raise JournalError(f"cannot seal a journal in {self._folder}: {error}; it is kept and read") from error

    async def close(self) -> None:
        """`close_sync`, off the event loop."""
        await asyncio.to_thread(self.close_sync)

    def close_sync(self) -> None:
        """Write what is queued, seal it, and give the lock back. A second close does nothing.

        Raises JournalError when something could not be written or sealed; `recover` seals it at the next start.
        """
        with self._gate:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self._thread.join()
        self._sealer.shutdown()
        if self._broken:
            self._part.release()
            raise JournalError(self._broken)
        try:
            self._part.seal(lost=True)
            for sealed in self._sealed:
                sealed.result()
        except OSError as error:
            raise JournalError(
                f"cannot seal a journal in {self._folder}: {error}; it is kept and read as it is"
            ) from error

    def _put(self, job: _Job) -> None:
        with self._gate:
            self._check_open()
            self._jobs.put(job)

    def _check_open(self) -> None:
        if self._broken or self._closed:
            raise JournalError(self._broken or f"the journal in {self._folder} is closed")

    def _serve(self) -> None:
        """The writer thread."""
        ended = False
        while not ended:
            jobs, ended = self._gather()
            if jobs and not self._broken:
                self._commit(jobs)
            for job in jobs:
                job.answer(self._broken)

    def _gather(self) -> tuple[list[_Job], bool]:
        """The next group, and whether it is the last. It filled while the one before was synced: no further wait."""
        jobs: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            jobs.append(job)
            try:
                job = self._jobs.get_nowait()
            except Empty:  # the group is complete
                return jobs, False
        return jobs, True

    def _commit(self, jobs: list[_Job]) -> None:
        with self._writing:
            if self._part.size >= self._rotate_bytes:
                self._trying(self._rotate)
            self._write([taken for job in jobs for taken in job.records])
        if any(job.done for job in jobs):
            self._trying(self._part.fsync)
        with self._writing:
            if self._part.size and any(job.seals for job in jobs):
                self._trying(self._rotate)

    def _write(self, records: Sequence[Record]) -> None:
        self._trying(lambda: self._append(records))

    def _append(self, records: Sequence[Record]) -> None:
        """Append records, and keep track of the calls that are not finished."""
        framed = [(taken, taken.frame(self._compress)) for taken in records]
        self._part.write(b"".join(frame for _, frame in framed))
        for taken, frame in framed:
            if taken.kind == BEGUN:
                self._unfinished[taken.call_id, taken.choice] = frame
            else:
                self._unfinished.pop((taken.call_id, taken.choice), None)

    def _trying(self, work: Callable[[], None]) -> None:
        """After a fault nothing more is written, and this call and all later ones are told."""
        if not self._broken:
            try:
                work()
            except (OSError, MemoryError, zstandard.ZstdError) as error:
                self._broken = f"cannot write {self._part.path}: {error}; mend the disk and start again"

    def _rotate(self) -> None:
        """Go on in a new part, which carries the unfinished calls over, and seal the full one meanwhile."""
        full, self._part = self._part, self._next_part()
        try:
            self._sealed.append(self._sealer.submit(full.seal, lost=False))
        except RuntimeError:  # the interpreter is ending and starts no threads: recovery seals it
            full.release()

    def _next_part(self) -> _Part:
        path = self._folder / f"{self.writer}-{next(self._numbers):06d}.journal"
        return _Part(path, b"".join([head(), *self._unfinished.values()]), self._sink)


@dataclass(frozen=True, slots=True)
class _Job:
    """Records that are written together; `done` is told when they are durable, if anyone waits for that."""

    records: tuple[Record, ...]
    done: Future[None] | None = None
    seals: bool = False
    """Whether the part is sealed behind it."""

    def answer(self, broken: str) -> None:
        if self.done is None:
            return
        if broken:
            self.done.set_exception(JournalError(broken))
        else:
            self.done.set_result(None)


class _Part:
    """One journal file and its lock."""

    def __init__(self, path: Path, head: bytes, sink: Callable[[Path], Sink]) -> None:
        new = path.with_suffix(".new")  # no reader and no recovery looks at it before it is locked and whole
        self._lock = os.open(new, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._sink = sink(new)
        self._sink.write(head)
        self._sink.fsync()
        new.rename(path)
        sync_folder(path.parent)
        self.path = path
        self.size = 0  # bytes behind the head

    def write(self, data: bytes) -> None:
        self._sink.write(data)
        self.size += len(data)

    def fsync(self) -> None:
        self._sink.fsync()

    def seal(self, *, lost: bool) -> None:
        try:
            seal(self.path, lost=lost)
        finally:
            self.release()

    def release(self) -> None:
        self._sink.close()
        os.close(self._lock)
