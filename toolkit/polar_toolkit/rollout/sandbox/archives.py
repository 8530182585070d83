"""Files on their way into and out of containers, as tar archives.

Invariant: an archive that comes out of a container was written by a harness. Nothing in it is written outside of the
target, through links that it brings or that lie there; links are made last, and lead where they say: whoever reads the
target does not follow them. Neither way can it grow past what its caller allows. Devices and pipes are left out.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from polar_toolkit.rollout.sandbox import SandboxError
from polar_toolkit.rollout.sandbox.folders import inside, remove

UID = 1000
"""Whose the files are, inside."""


def pack(source: Path, name: str, into: IO[bytes], most_bytes: int) -> None:
    """Write a file or a folder as `name`; for "" a folder's contents alone. Raises SandboxError when it is too much."""
    total = 0

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal total
        total += member.size
        if total > most_bytes:
            raise SandboxError(f"{source} holds more than {most_bytes} bytes (holes count): it is not copied")
        member.uid, member.gid, member.uname, member.gname = UID, UID, "", ""
        return member if member.isfile() or member.isdir() or member.issym() or member.islnk() else None

    with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            tar.addfile(_folder(str(parent)))
        if name:
            tar.add(source, name, filter=owned)
        else:
            for entry in sorted(source.iterdir()):
                tar.add(entry, entry.name, filter=owned)
    into.seek(0)


def unpack(pieces: Iterable[bytes], target: Path, most_bytes: int) -> None:
    """Write a file, or the contents of a folder, as the engine packs it. Raises SandboxError."""
    links: list[tuple[Path, str]] = []
    try:
        with tarfile.open(fileobj=_Pieces(iter(pieces), most_bytes), mode="r|") as tar:
            for member in tar:
                _unpack(tar, member, target, links)
        for _ in pieces:  # what fills the last block: a stream that is left keeps its connection
            continue
        for place, leads_to in links:
            inside(target, place).parent.mkdir(parents=True, exist_ok=True)
            _clear(place)
            place.symlink_to(leads_to)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise SandboxError(f"what came out of the container cannot be written to {target}: {error}") from error


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, links: list[tuple[Path, str]]) -> None:
    below = _below(member.name)
    place = inside(target, target / below) if below else target
    if member.isdir():
        if place.is_symlink() or place.is_file():
            place.unlink()
        place.mkdir(parents=True, exist_ok=True)
        return
    _clear(place)
    if member.issym():
        links.append((place, member.linkname))
    elif member.islnk():
        first = inside(target, target / _below(member.linkname))
        if first.is_file() and not first.is_symlink():  # else of a link or of what was left out
            place.hardlink_to(first)
    elif member.isfile():
        place.parent.mkdir(parents=True, exist_ok=True)
        tar.extract(member.replace(name=place.name, deep=False), place.parent, filter="data")


def _below(name: str) -> str:
    """Without the first part, which names the folder itself."""
    return "/".join(PurePosixPath(name).parts[1:])


def _clear(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        remove(place)
    else:
        place.unlink(missing_ok=True)


def _folder(name: str) -> tarfile.TarInfo:
    folder = tarfile.TarInfo(name)
    folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o755, UID, UID
    return folder


class _Pieces(io.RawIOBase):
    """Pieces of bytes as a file that is read once."""

    def __init__(self, pieces: Iterator[bytes], most_bytes: int) -> None:
        self._pieces = pieces
        self._rest = b""
        self._left = most_bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        while len(self._rest) < size and (piece := next(self._pieces, b"")):
            self._left -= len(piece)
            if self._left < 0:
                raise SandboxError("what came out of the container is larger than its disk (holes count): not copied")
            self._rest += piece
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken
