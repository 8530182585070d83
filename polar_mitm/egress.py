"""Which connections may leave: to hosts that the user named, at addresses that are really out there.

Invariant: what is returned is an address that was checked itself, so that a name which resolves to another address at
the next look-up (DNS rebinding) gains nothing. It resolves names and opens no connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from polar_mitm.errors import PolarError

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""All IP addresses of a host."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Forbidden(PolarError):
    """A connection that must not be made."""

    status = 403
    kind = "forbidden"


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host as the system gives them, IPv4 first: sandboxes often have no route for IPv6."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[-1][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]


class Egress:
    """The hosts that a run passes through."""

    def __init__(self, hosts: Sequence[str], engine: str, resolve: Resolve = resolve) -> None:
        """`hosts` are names, or `*.name` for all below a name; `engine` is the engine's URL."""
        self._hosts = tuple(hosts)
        self._engine_url = engine
        self._engine = urlsplit(engine).hostname or ""
        self._resolve = resolve

    def also(self, hosts: Sequence[str]) -> Egress:
        """The same with more hosts."""
        return Egress((*self._hosts, *hosts), self._engine_url, self._resolve) if hosts else self

    def allows(self, host: str) -> bool:
        """Whether the user named this host."""
        name = host.lower().rstrip(".")
        return any(fnmatchcase(name, pattern) for pattern in self._hosts)

    async def address(self, host: str, port: int) -> str:
        """The IP address at which an allowed host may be reached. Raises Forbidden."""
        if not self.allows(host):
            raise Forbidden(f"connections to {host}:{port} are not allowed (option polar_allow_hosts)")
        try:
            found, engine = await self._resolve(host, port), await self._resolve(self._engine, 0)
        except OSError as error:
            raise Forbidden(f"{host} cannot be resolved: {error}") from error
        public = [address for address in found if is_public(address) and address not in engine]
        if not public:
            raise Forbidden(f"{host} is at {', '.join(found)}, where nothing but this machine and its network is")
        return public[0]


def is_public(address: str) -> bool:
    """Whether an IP address is neither loopback, private, link-local, multicast nor reserved, nor a form of such."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast
