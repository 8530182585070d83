"""Interception without proxy variables: inside a namespace, every connection to a web port lands at the interceptor.

Invariant: names resolve to one address that no machine has, and what goes to port 80 or 443 of any address arrives at
the given port on loopback, with the address that was meant kept by the kernel (SO_ORIGINAL_DST). What is redirected
never was on its way out, so the namespace's record of attempts still lists all the rest. IPv4 only: a name has no IPv6
address here, and a connection to one is refused and recorded as ever.
"""

from __future__ import annotations

import socketserver
import subprocess
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address

from mitmproxy.dns import DNSMessage, ResourceRecord
from mitmproxy.net.dns import types

from tests.bench.netns import Namespace
from tests.bench.provisions import nft

ADDRESS = "198.18.0.1"
"""What every name resolves to: of the block that is set aside for tests of network devices."""
_RULES = """
table ip interception {{
  chain output {{
    type nat hook output priority -100
    ip daddr != 127.0.0.0/8 tcp dport {{ 80, 443 }} redirect to :{port}
    udp dport 53 redirect to :{names}
  }}
}}
"""


class _Names(socketserver.UDPServer):
    """Answers every look-up of an IPv4 address with ADDRESS, and every other with nothing."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Lookup)
        self.asked: list[str] = []


class _Lookup(socketserver.BaseRequestHandler):
    server: _Names

    def handle(self) -> None:
        """Answer one query."""
        query, back = self.request
        message = DNSMessage.unpack(query)
        self.server.asked += [question.name for question in message.questions]
        wanted = [question.name for question in message.questions if question.type == types.A]
        answers = [ResourceRecord.A(name, IPv4Address(ADDRESS)) for name in wanted]
        back.sendto(message.succeed(answers).packed, self.client_address)


@contextmanager
def redirected(namespace: Namespace, port: int) -> Generator[list[str]]:
    """While inside the block, the namespace is intercepted at a loopback port; yields the names that were looked up."""
    with ExitStack() as stack:
        with namespace.entered():
            names = stack.enter_context(_Names())
            _load(_RULES.format(port=port, names=names.server_address[1]))
        answering = threading.Thread(target=names.serve_forever, kwargs={"poll_interval": 0.05})
        answering.start()
        try:
            yield names.asked
        finally:
            names.shutdown()
            answering.join()
            with namespace.entered():
                _load("delete table ip interception")


def _load(rules: str) -> None:
    done = subprocess.run([nft(), "-f", "-"], input=rules, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"nft refuses the rules (the kernel needs nf_tables with NAT): {done.stderr}")
