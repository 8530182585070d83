"""The arguments of bubblewrap for one sandbox: what of the machine is seen inside, and how.

Invariant: nothing of the host is named or seen that is not listed here: its programs (/usr) and the few files of /etc
without which they do not start, the harness's programs, the sandbox's own folders. Nothing outside of these folders can
be written to. It starts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar_toolkit.rollout.sandbox import Mount

INSIDE = "/.inside.py"
_SHARED_MEMORY_BYTES = 64 << 20
_ROOT_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("ld.so.cache", "ld.so.conf", "alternatives", "ssl/openssl.cnf", "services", "protocols")
_PYTHON = Path("/usr/bin/python3")
OWN_ETC: Mapping[str, str] = {
    "passwd": "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/bash\nnobody:x:65534:65534::/:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "resolv.conf": "nameserver 127.0.0.53\noptions timeout:2 attempts:2\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "os-release": 'ID=linux\nNAME="Linux"\n',
}
"""Files of /etc that are the same in every sandbox."""
_ALWAYS = (
    "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox",
    "--die-with-parent", "--new-session", "--clearenv",
)  # fmt: skip
_UNPRIVILEGED = ("--unshare-user", "--uid", "0", "--gid", "0")
_RIGHTS = ("NET_ADMIN", "NET_BIND_SERVICE", "SETPCAP")
"""What `inside` uses before it gives up everything."""
_RIGHTS_OF_ROOT = ("SETUID", "SETGID", "SYS_ADMIN")
_RIGHTS_OF_A_USER = ("SETFCAP",)


@dataclass(frozen=True, slots=True)
class Scene:
    """What is seen inside."""

    etc: Path
    """Folder of the host with the files of OWN_ETC."""
    folders: Mapping[str, Path]
    """Path inside -> file or folder of the host that can be written to."""
    files: Sequence[Mount]
    """Read-only files and folders."""
    as_root: bool
    """Whether the machine's root starts it, and so needs no user namespace to begin with."""


def python() -> tuple[str, tuple[Mount, ...]]:
    """A Python that runs inside, and what has to be seen for it: the machine's, else the one that runs this."""
    if _PYTHON.exists():
        return str(_PYTHON), ()
    prefix = Path(sys.base_prefix)
    return f"{prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}", (Mount(prefix, str(prefix)),)


def arguments(scene: Scene) -> list[str]:
    """All options of bubblewrap."""
    rights = (*_RIGHTS, *(_RIGHTS_OF_ROOT if scene.as_root else _RIGHTS_OF_A_USER))
    words = [*_ALWAYS, *(() if scene.as_root else _UNPRIVILEGED), "--cap-drop", "ALL"]
    for right in rights:
        words += ["--cap-add", f"CAP_{right}"]
    around = _around([*scene.folders, *(mount.target for mount in scene.files), "/etc/x", "/var/x"])
    within = {folder for folder in around if any(is_below(folder, place) for place in scene.folders)}
    for folder in around:
        words += _open_folder(folder) if folder not in within else []
    words += ["--ro-bind", "/usr", "/usr"]
    for name in _ROOT_FOLDERS:
        words += _root_folder(Path("/", name))
    for name in _ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in OWN_ETC:
        words += ["--ro-bind", f"{scene.etc / name}", f"/etc/{name}"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += ["--perms", "1777", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--symlink", "../tmp", "/var/tmp"]
    places = {folder: _open_folder(folder) for folder in within}
    places |= {target: ["--bind", f"{source}", target] for target, source in scene.folders.items()}
    places |= {mount.target: ["--ro-bind", f"{mount.source}", mount.target] for mount in scene.files}
    for place in sorted(places):  # what lies around before what lies within
        words += places[place]
    return [*words, "--remount-ro", "/", "--chdir", "/"]


def is_below(path: str, place: str) -> bool:
    """Whether a path is a place or lies in it."""
    return Path(path).is_relative_to(place)


def _open_folder(path: str) -> list[str]:
    """bubblewrap's own are for their owner alone."""
    return ["--perms", "0755", "--dir", path]


def _around(targets: Sequence[str]) -> list[str]:
    """The folders in which these lie, the outer ones first; not those of the machine, which are there."""
    found = {str(folder) for target in targets for folder in Path(target).parents}
    return sorted(folder for folder in found if folder != "/" and not Path(folder).is_relative_to("/usr"))


def _root_folder(path: Path) -> list[str]:
    if path.is_symlink():
        return ["--symlink", f"{path.readlink()}", f"{path}"]
    return ["--ro-bind-try", f"{path}", f"{path}"]
