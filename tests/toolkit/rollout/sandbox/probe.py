"""Looks around from inside a sandbox and prints what it found, as JSON. Standard library only; changes nothing outside.

Invariant: it connects only to what it is told, which its test listens on; a family of sockets is tried with socket().
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = {
    "x86_64": {"keyctl": 250, "add_key": 248, "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425},
    "aarch64": {"keyctl": 219, "add_key": 217, "bpf": 280, "perf_event_open": 241, "io_uring_setup": 425},
}
SECONDS = 2


def main(told: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "capabilities": {name: status[name] for name in status if name.startswith("Cap")},
        "no_new_privs": status["NoNewPrivs"].strip(),
        "uid": [os.getuid(), os.geteuid(), os.getgid(), os.getgroups()],
        "tcp": {address: tcp(address, told["tcp"]) for address in told["addresses"]},
        "web": {address: web(address) for address in told["addresses"]},
        "udp": [named(lambda address=address: udp(address, told["udp"])) for address in told["addresses"]],
        "abstract": named(lambda: unix("\0" + told["abstract"])),
        "unix": named(lambda: unix(told["unix"])),
        "neighbour": {address: tcp(address, told["neighbour"]) for address in told["addresses"]},
        "names": {name: looked_up(name) for name in told["names"]},
        "families": [family for family in range(46) if named(lambda family=family: made(family)) == "done"],
        "raw": named(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()),
        "calls": {name: called(number) for name, number in CALLS[os.uname().machine].items()},
        "written": {path: named(lambda path=path: wrote(path)) for path in told["write"]},
        "seen": [path for path in told["files"] if os.path.lexists(path)],
        "root": sorted(path.name for path in Path("/").iterdir()),
        "processes": sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()),
        "words": words(),
        "environment": dict(os.environ),
        "descriptors": descriptors(),
        "limits": [resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_CORE)],
        "host": os.uname().nodename,
        "mount": mounted(),
    }


def named(act: Callable[[], object]) -> str:
    """What came of it: done, or the name of the error."""
    try:
        act()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "done"


def tcp(address: str, port: int) -> str:
    return named(lambda: socket.create_connection((address, port), SECONDS).close())


def web(address: str) -> str:
    """What a connection to the port of the web brings: at best its end."""
    try:
        with socket.create_connection((address, 443), SECONDS) as connection:
            return connection.recv(100).decode("latin-1")
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))


def udp(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.sendto(b"from inside", (address, port))


def unix(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect(path)


def made(family: int) -> None:
    """A socket of any kind of this family."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW):
        if named(lambda kind=kind: socket.socket(family, kind).close()) == "done":
            return
    socket.socket(family, socket.SOCK_STREAM).close()


def looked_up(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, 443, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        return str(error.args[0])


def called(number: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    return "done" if libc.syscall(number, 0, 0, 0, 0, 0) >= 0 else errno.errorcode[ctypes.get_errno()]


def wrote(path: str) -> None:
    with open(path, "ab"):  # noqa: PTH123  # an existing file is not changed either
        pass


def words() -> list[str]:
    """All that can be read of any process's arguments and environment."""
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                found += (folder / name).read_text(errors="replace").split("\0")
            except OSError:
                continue
    return found


def descriptors() -> list[str]:
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]  # but the listing's own: gone
    return [str(path.readlink()).split(":")[0] for path in sorted(paths, key=lambda path: int(path.name))]


def mounted() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    return "done" if not libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) else errno.errorcode[ctypes.get_errno()]


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
