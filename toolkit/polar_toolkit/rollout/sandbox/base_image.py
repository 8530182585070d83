"""An image made of this machine: its programs, mounted, over a few files of its own. No registry is asked for it.

Invariant: the image holds nothing of the machine but the few files of /etc without which its programs do not start; its
programs are seen through a read-only mount, so that the image weighs nothing and is as new as they are. It serves
containers on this machine alone.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from docker import APIClient

from polar_toolkit.rollout.sandbox import BUNDLE, HOME, Mount
from polar_toolkit.rollout.sandbox.archives import UID
from polar_toolkit.rollout.sandbox.bubblewrap import OWN_ETC
from polar_toolkit.rollout.task import TESTS

REPOSITORY = "polar-base"
_ROOT_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("ld.so.cache", "ld.so.conf", "ssl/openssl.cnf", "services", "protocols", BUNDLE.removeprefix("/etc/"))
_FOLDERS = ("dev", "etc", "home", "opt", "proc", "root", "run", "srv", "sys", "usr", "var")


def build(api: APIClient, workdir: str) -> str:
    """The name of the image with a working folder, which is made unless it is there. Blocking."""
    archive = _archive(workdir)
    tag = hashlib.sha256(archive).hexdigest()[:16]
    name = f"{REPOSITORY}:{tag}"
    if not api.images(name):
        api.import_image_from_data(archive, repository=REPOSITORY, tag=tag)
    return name


def programs() -> tuple[Mount, ...]:
    """The programs of this machine."""
    real = (Path("/", name) for name in _ROOT_FOLDERS if Path("/", name).is_dir() and not Path("/", name).is_symlink())
    return tuple(Mount(folder, str(folder)) for folder in (Path("/usr"), *real))


def _archive(workdir: str) -> bytes:
    """The same bytes for the same machine."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in {member.name: (member, content) for member, content in _members(workdir)}.values():
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _members(workdir: str) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    for name in _FOLDERS:
        yield _folder(name, 0o755), b""
    yield _folder("tmp", 0o1777), b""
    yield _link("var/tmp", "../tmp"), b""
    for place in (HOME, TESTS, workdir):
        inside = PurePosixPath(place.lstrip("/"))
        for parent in reversed(inside.parents[:-1]):
            yield _folder(str(parent), 0o755), b""
        yield _folder(str(inside), 0o755, UID), b""
    for link in (*(Path("/", name) for name in _ROOT_FOLDERS), *sorted(Path("/etc/alternatives").glob("*"))):
        if link.is_symlink():
            yield _link(str(link).lstrip("/"), str(link.readlink())), b""
    known = {name: Path("/etc", name).read_bytes() for name in _ETC if Path("/etc", name).is_file()}
    for name, content in (known | {name: text.encode() for name, text in OWN_ETC.items()}).items():
        yield tarfile.TarInfo(f"etc/{name}"), content


def _folder(name: str, mode: int, uid: int = 0) -> tarfile.TarInfo:
    folder = tarfile.TarInfo(name)
    folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, mode, uid, uid
    return folder


def _link(name: str, leads_to: str) -> tarfile.TarInfo:
    link = tarfile.TarInfo(name)
    link.type, link.linkname = tarfile.SYMTYPE, leads_to
    return link
