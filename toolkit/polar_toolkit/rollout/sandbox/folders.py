"""Folders that a harness has written, copied and removed by the host.

Invariant: nothing that a harness can make of files - links to elsewhere, modes that forbid, holes, many names for one
file, pipes, set-user-id bits - lets a copy read outside of its source, stand still, grow past what the source takes on
the disk, or leave a privileged file; and nothing keeps a folder from being removed. The processes of the sandbox have
ended before. It runs nothing that it finds.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from pathlib import Path

_Node = tuple[int, int]  # device and inode
_PIECE = 1 << 24
_REMOVAL_SECONDS = 120


def inside(root: Path, path: Path) -> Path:
    """The path, if the folder that it lies in is below `root`. Raises ValueError when a link leads away."""
    if path != root and not path.parent.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"{path} leads out of {root}")
    return path


def copy(source: Path, target: Path) -> None:
    """Copy a file, a link, or the contents of a folder; what is neither is left out, and so is what is too deep.

    Folders and files that are there already are kept and overwritten. Raises OSError.
    """
    names: dict[_Node, Path] = {}
    if not stat.S_ISDIR(source.lstat().st_mode):
        target.parent.mkdir(parents=True, exist_ok=True)
        return _copy_entry(source, target, names)
    target.mkdir(parents=True, exist_ok=True)
    pending = [(source, target)]
    while pending:
        below, above = pending.pop()
        for name in _names_in(below):
            entry, copied = below / name, above / name
            try:
                mode = entry.lstat().st_mode
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:  # deeper than a path can say: nobody's work
                    continue
                raise
            if stat.S_ISDIR(mode):
                _make_folder(copied, mode)
                pending.append((entry, copied))
            else:
                _copy_entry(entry, copied, names)
    return None


def remove(folder: Path) -> None:
    """Remove a folder and all in it; one that is not there is no error. Raises OSError when something is left."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):  # forbidding modes, or deeper than Python goes: the system's own tools manage
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False, timeout=_REMOVAL_SECONDS)
        if folder.exists():
            raise


def _names_in(folder: Path) -> list[str]:
    try:
        if not os.access(folder, os.R_OK | os.X_OK):  # the harness shut it; it is its owner's, who is us
            folder.chmod(0o700)
        return [entry.name for entry in folder.iterdir()]
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return []
        raise


def _make_folder(folder: Path, mode: int) -> None:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        folder.unlink()
    folder.mkdir(exist_ok=True)
    folder.chmod(stat.S_IMODE(mode) & 0o777 | 0o700)  # 0o700: it has to be written to


def _copy_entry(source: Path, target: Path, names: dict[_Node, Path]) -> None:
    found = source.lstat()
    if target.is_dir() and not target.is_symlink():
        remove(target)
    else:
        target.unlink(missing_ok=True)
    if stat.S_ISLNK(found.st_mode):
        return target.symlink_to(source.readlink())
    if not stat.S_ISREG(found.st_mode):
        return None
    node = (found.st_dev, found.st_ino)
    if found.st_nlink > 1 and node in names:
        return target.hardlink_to(names[node])
    _copy_file(source, target, found)
    names[node] = target
    return None


def _copy_file(source: Path, target: Path, found: os.stat_result) -> None:
    if not os.access(source, os.R_OK):
        source.chmod(0o600)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(source, flags), "rb") as read, target.open("xb") as written:
        _copy_data(read.fileno(), written.fileno(), found.st_size)
        os.fchmod(written.fileno(), stat.S_IMODE(found.st_mode) & 0o777)
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _copy_data(read: int, written: int, size: int) -> None:
    """Holes stay holes."""
    offset = 0
    while offset < size:
        try:
            offset = os.lseek(read, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole to the end
                break
            raise
        end = os.lseek(read, offset, os.SEEK_HOLE)
        os.lseek(written, offset, os.SEEK_SET)
        while offset < end:
            offset += os.sendfile(written, read, offset, min(_PIECE, end - offset)) or end
    os.truncate(written, size)
