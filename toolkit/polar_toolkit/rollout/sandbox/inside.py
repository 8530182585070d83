"""What runs first inside a local sandbox: it opens the listeners, gives up every right, and becomes the command.

Invariant: the command begins with no capability that it could use or gain, as uid 1000, in a user namespace of its
own, and with no descriptor but its three streams. It runs under whatever Python the machine has (3.9 or later), from
this one file, and so uses nothing but the standard library.

The host's end of the socket gets a message with the listeners; it sends the command as JSON and its end of the stream.

    python3 -I inside.py SOCKET_FD
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import struct
import sys
from typing import Any

PORTS = (443, 80)
"""Where connections are led to the interceptor, whatever address they are meant for."""
RESOLVER = "127.0.0.53"
UID = 1000
_DNS_PORT = 53
_BACKLOG = 256
_CLONE_NEWUSER = 0x10000000
_MNT_DETACH = 2
_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 23, 24, 38
_PR_SET_DUMPABLE = 4
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_RTM_NEWROUTE, _NEW_AND_TELL = 24, 0x1 | 0x4 | 0x200 | 0x400  # NLM_F_REQUEST, _ACK, _EXCL, _CREATE
_TABLE_LOCAL, _PROTOCOL_BOOT, _SCOPE_HOST, _TYPE_LOCAL, _ATTRIBUTE_OIF = 255, 3, 254, 2, 4
_COVERED = ("sys", "sysrq-trigger", "irq", "bus")


def make_everything_local() -> None:
    """Lead every IPv4 address to this network's loopback device: `ip route add local 0.0.0.0/0 dev lo`.

    Raises OSError, and PermissionError for who may not administer this network.
    """
    route = struct.pack("8BI", socket.AF_INET, 0, 0, 0, _TABLE_LOCAL, _PROTOCOL_BOOT, _SCOPE_HOST, _TYPE_LOCAL, 0)
    device = struct.pack("HHI", 8, _ATTRIBUTE_OIF, socket.if_nametoindex("lo"))
    header = struct.pack("IHHII", 16 + len(route + device), _RTM_NEWROUTE, _NEW_AND_TELL, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(header + route + device)
        (error,) = struct.unpack_from("i", kernel.recv(4096), 16)
    if error:
        raise OSError(-error, os.strerror(-error), "route to the loopback device")


def listeners() -> list[socket.socket]:
    """Sockets in this network: one that listens at each of PORTS, and last the one for DNS queries."""
    opened: list[socket.socket] = []
    for port in PORTS:
        listener = socket.socket()
        opened.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("0.0.0.0", port))
        listener.listen(_BACKLOG)
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind((RESOLVER, _DNS_PORT))
    return [*opened, names]


def main(descriptor: int) -> None:
    """Open the network, wait for the command, become it."""
    host = socket.socket(fileno=descriptor)
    setting = json.loads(_line(host))
    opened: list[socket.socket] = []
    if setting["network"]:
        make_everything_local()
        opened = listeners()
    socket.send_fds(host, [b"ready"], [each.fileno() for each in opened])
    for each in opened:
        each.close()
    words = b"".join(iter(lambda: host.recv(1 << 16), b""))
    if not words:
        sys.exit(0)  # the sandbox is not needed any more
    host.sendall(b"!")  # from here on the command has begun
    host.close()
    command: dict[str, Any] = json.loads(words)
    give_up(setting["uid"])
    _limit(command["pids"], command["file_bytes"])
    _become(command)


def give_up(uid: int | None) -> None:
    """Become UID in a user namespace of its own, without any capability. `uid`: whom to be outside, where root began.

    Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if uid is not None:
        for name in _COVERED:  # bubblewrap hides them from root; we are not root in a moment, and a harness's own
            libc.umount2(f"/proc/{name}".encode(), _MNT_DETACH)  # sandbox could not mount a /proc with parts hidden
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        _demand(libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "own our /proc/self")  # lost with the change of user
    outer = (os.getuid(), os.getgid())
    _demand(libc.unshare(_CLONE_NEWUSER), "unshare a user namespace")
    _tell("/proc/self/setgroups", "deny")
    _tell("/proc/self/gid_map", f"{UID} {outer[1]} 1")
    _tell("/proc/self/uid_map", f"{UID} {outer[0]} 1")
    _demand(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "clear the ambient capabilities")
    capability = 0
    while libc.prctl(_PR_CAPBSET_READ, capability, 0, 0, 0) >= 0:
        _demand(libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), f"drop capability {capability}")
        capability += 1
    _demand(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")


def _line(host: socket.socket) -> bytes:
    read = b""
    while not read.endswith(b"\n"):
        piece = host.recv(4096)
        if not piece:
            sys.exit(0)  # the runner is gone
        read += piece
    return read


def _limit(pids: int, file_bytes: int) -> None:
    """Only now: what a user namespace was made under is a limit for all sandboxes of its user together."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, value in ((resource.RLIMIT_NPROC, pids), (resource.RLIMIT_FSIZE, file_bytes)):
        _, hard = resource.getrlimit(kind)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


def _become(command: dict[str, Any]) -> None:
    if not command["stdin"]:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 1 << 16)
    try:
        os.chdir(command["cwd"])
        os.execvpe(command["argv"][0], command["argv"], command["env"])
    except OSError as error:  # as a shell says it
        os.write(2, f"{command['argv'][0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _tell(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123  # Path is not imported: it costs a third of the start
        file.write(text)


def _demand(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {what}: {os.strerror(code)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
