"""What a command prints, kept in a file that cannot grow past a bound.

Invariant: whatever a harness prints, the first and the last half of the bound survive, and the place in between says
how much is missing; memory stays flat, for the last half is a ring on the disk. It decodes nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

from polar_toolkit.rollout.sandbox import LOG_BYTES

_PIECE = 1 << 16


class CappedFile:
    """A log file; readable while it is written, in its final order once it is closed."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        """Create or empty the file. `limit` is in bytes, the line about what is missing comes on top."""
        self._file = path.open("w+b", buffering=0)
        self._half = limit // 2
        self._written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Append; what is older than the last half is overwritten, but for the first half."""
        head = data[: max(0, self._half - self._written)]
        if head:
            self._place(0, self._written, head)
        tail = memoryview(data)[len(head) :]
        skipped = max(0, len(tail) - self._half)  # it would be overwritten by the rest of this very piece
        begin = self._written + len(head) - self._half + skipped
        while skipped < len(tail):
            offset = begin % self._half
            piece = tail[skipped : skipped + self._half - offset]
            self._place(self._half, offset, piece)
            begin += len(piece)
            skipped += len(piece)
        self._written += len(data)

    def close(self) -> None:
        """Put the last half in order and say what is missing before it. May be called twice."""
        if self._file.closed:
            return
        missing = self._written - 2 * self._half
        if missing > 0:
            self._file.seek(self._half)
            ring = self._file.read(self._half)
            oldest = missing % self._half
            notice = b"\n[... %d bytes are missing here ...]\n" % missing
            self._place(self._half, 0, notice + ring[oldest:] + ring[:oldest])
        self._file.close()

    def _place(self, base: int, offset: int, data: bytes | memoryview) -> None:
        self._file.seek(base + offset)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]


async def pump(reader: asyncio.StreamReader, file: CappedFile) -> None:
    """Write all that a stream brings, to its end. The caller closes the file."""
    while data := await reader.read(_PIECE):
        file.write(data)
