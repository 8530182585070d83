"""The second way out of a container: a network without a way out, and in it a relay, both made by the engine alone.

Invariant: each sandbox has a network of its own, so that no two see each other; the engine's name service answers the
allowed names with the relay's address and asks only the relay about others; the session's secret is in the relay's
container only. It needs neither root nor an engine on this machine. It does not allow `*.NAME`: the engine's name
service knows whole names. Blocking; errors are the SDK's, and SandboxError.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker import APIClient, types
from docker.errors import APIError, NotFound

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout.sandbox import Mount, Network, SandboxError, base_image, container_life, relay
from polar_toolkit.rollout.sandbox.container import USER
from polar_toolkit.rollout.sandbox.container_images import Image
from polar_toolkit.rollout.sandbox.docker_engine import Engine

WAY, HOST, IMAGE = "POLAR_DOCKER_NETWORK", "POLAR_INTERCEPTOR_HOST", "POLAR_RELAY_IMAGE"
"""`relay` or `listeners`, in place of our choice; where a container finds this machine; an image with python3.
"""
_ENGINES_NAME = "host.docker.internal"
_DEFAULT_IMAGE = "python:3.13-slim-bookworm"
_PYTHON = "/usr/bin/python3"
_OUTWARD = "bridge"
"""The engine's own network, over which a relay reaches this machine."""
_SUBNETS, _PREFIX = ipaddress.IPv4Network("198.18.0.0/15"), 29
"""Of the range for benchmarks, which is routed nowhere: the engine's own pools hold some thirty networks."""
_RELAYS = 2
"""Which address of the network is the relay's; the first is the gateway's, which nobody has."""
_NO_GATEWAY = {"com.docker.network.bridge.inhibit_ipv4": "true"}
"""The bridge gets no address, at which services of the engine's machine would be reached."""
_TRIES = 16
_START_S, _PAUSE_S = 30.0, 0.05
_MEMORY, _PROCESSES = 128 << 20, 16


@dataclass(frozen=True, slots=True)
class Relays:
    """How they are made on one engine."""

    interceptor: str
    """Name or address of this machine, as a container on the engine's own network finds it."""
    image: str
    """What they run in; "" for the image that is made of this machine."""


def relays(engine: Engine) -> Relays | None:
    """None where the sockets of a container can be made from outside. Raises Refusal for an unknown choice."""
    asked = os.environ.get(WAY, "")
    if asked not in ("", "relay", "listeners"):
        raise Refusal(f"{WAY} is {asked!r}; give relay or listeners, or leave it out")
    if asked == "listeners" or (not asked and engine.is_socket and os.geteuid() == 0):
        return None
    ours = engine.is_socket and sys.platform == "linux" and Path(_PYTHON).exists()
    image = os.environ.get(IMAGE) or ("" if ours else _DEFAULT_IMAGE)
    return Relays(os.environ.get(HOST) or _ENGINES_NAME, image)


class RelayedNetwork:
    """That of one sandbox."""

    def __init__(self, way_out: Network, labels: Mapping[str, str], how: Relays, image: Image) -> None:
        """Raises SandboxError for names that this way cannot allow."""
        patterns = [name for name in way_out.names if "*" in name]
        if patterns:
            raise SandboxError(
                f"{patterns[0]!r} cannot be allowed in a docker sandbox with a relay, which knows whole names only: "
                "write each name in full, or use docker as root on the engine's own machine, or --sandbox local"
            )
        self._way_out, self._labels = way_out, dict(labels)
        self._how, self._image = how, image
        self._name = f"polar-{secrets.token_hex(8)}"
        self._container = self._address = ""

    def make(self, api: APIClient) -> None:
        """Make the network, and a relay that listens. Its parts are known to `remove` as soon as they are there."""
        subnet = self._make_network(api)
        self._address = str(subnet[_RELAYS])
        self._container = api.create_container(labels=self._labels, **self._arguments(api, subnet))["Id"]
        api.connect_container_to_network(self._container, _OUTWARD)
        api.start(self._container)
        deadline = time.monotonic() + _START_S
        while not (said := self._said(api)).startswith("listening"):
            if time.monotonic() > deadline or not api.inspect_container(self._container)["State"]["Running"]:
                raise SandboxError(f"the relay of {self._name} does not listen; it said: {said[-500:]!r}")
            time.sleep(_PAUSE_S)

    def join(self, settings: dict[str, Any]) -> None:  # Any: JSON
        """Put a container that is to be created into it."""
        settings["host_config"] |= {"NetworkMode": self._name, "Dns": [self._address]}

    def refused(self, api: APIClient) -> Counter[str]:
        """NAME:PORT of connections that the relay ended."""
        if not self._container:
            return Counter()
        lines = (line.split(" ", 1) for line in self._said(api).splitlines() if line.startswith("refused "))
        return Counter(wanted for _, wanted in lines)

    def remove(self, api: APIClient) -> None:
        """Remove the relay and the network, which the sandbox's container has left; what is gone is no error."""
        container_life.remove(api, self._container, [])
        container_life.remove_network(api, self._name)

    def _make_network(self, api: APIClient) -> ipaddress.IPv4Network:
        for left in range(_TRIES, 0, -1):
            block = secrets.randbelow(1 << (_PREFIX - _SUBNETS.prefixlen))
            subnet = ipaddress.IPv4Network((_SUBNETS.network_address + (block << (32 - _PREFIX)), _PREFIX))
            try:
                api.create_network(
                    self._name, "bridge", internal=True, labels=self._labels, options=_NO_GATEWAY,
                    ipam=types.IPAMConfig(pool_configs=[types.IPAMPool(subnet=str(subnet))]),
                )  # fmt: skip
            except APIError as error:
                if left == 1 or "overlaps" not in str(error.explanation):
                    raise
            else:
                return subnet
        raise AssertionError("left by the last try")

    def _arguments(self, api: APIClient, subnet: ipaddress.IPv4Network) -> dict[str, Any]:  # Any: JSON
        way_out, how, image = self._way_out, self._how, self._image
        setting = {
            "proxy": [how.interceptor, way_out.proxy[1]], "session": way_out.session, "secret": way_out.secret,
            "names": way_out.names, "within": str(subnet), "ports": {"443": 443, "80": 80, "53": 53},
        }  # fmt: skip
        host = api.create_host_config(
            mounts=[_shown(each) for each in base_image.programs()] if image.is_base else [],
            network_mode=self._name,
            extra_hosts={_ENGINES_NAME: "host-gateway"} if how.interceptor == _ENGINES_NAME else None,
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            sysctls={"net.ipv4.ip_forward": "0", "net.ipv4.ip_unprivileged_port_start": "0"},
            mem_limit=_MEMORY,
            pids_limit=_PROCESSES,
            log_config=types.LogConfig(type="json-file", config={"max-size": "1m"}),
        )
        endpoint = api.create_endpoint_config(aliases=list(way_out.names), ipv4_address=self._address)
        return {
            "image": image.name,
            "entrypoint": [_PYTHON if image.is_base else "python3", "-I", "-c", Path(relay.__file__).read_text()],
            "command": [],
            "user": USER,
            "working_dir": "/",
            "environment": {"POLAR_RELAY": json.dumps(setting)},
            "healthcheck": {"test": ["NONE"]},
            "stop_signal": "SIGKILL",
            "host_config": host,
            "networking_config": {"EndpointsConfig": {self._name: endpoint}},
            "use_config_proxy": False,
        }

    def _said(self, api: APIClient) -> str:
        try:
            return api.logs(self._container).decode(errors="replace")
        except NotFound:  # an engine that was killed may have lost it
            return ""


def _shown(mount: Mount) -> types.Mount:
    return types.Mount(mount.target, str(mount.source.resolve()), "bind", read_only=True)
