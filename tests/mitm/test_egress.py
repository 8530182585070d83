"""The guard: named hosts only, and only at addresses that are out there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from polar_mitm.egress import Egress, Forbidden, is_public, resolve

PUBLIC = "140.82.121.4"
ENGINE = "8.8.8.8"


def names(**hosts: Sequence[str]) -> Egress:
    """A guard for a few hosts, in a world where these names resolve to these addresses."""
    known = {name.replace("_", "."): found for name, found in hosts.items()} | {"engine.example": [ENGINE]}

    async def look_up(host: str, port: int) -> Sequence[str]:
        if host not in known:
            raise OSError("Name or service not known")
        return known[host]

    return Egress(("github.com", "*.example.org"), "http://engine.example:30000", look_up)


def address(egress: Egress, host: str) -> str:
    return asyncio.run(egress.address(host, 443))


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("github.com", True), ("GitHub.com", True), ("github.com.", True), ("a.example.org", True),
        ("a.b.example.org", True),
        ("example.org", False), ("evil-github.com", False), ("github.com.evil.org", False), ("a.github.com", False),
        ("127.0.0.1", False), ("", False),
    ],
)  # fmt: skip
def test_a_host_is_allowed_by_its_name(host: str, *, allowed: bool) -> None:
    """Whole, or below a name with a star."""
    assert names().allows(host) is allowed


def test_an_allowed_host_is_reached_at_the_address_that_was_checked() -> None:
    """The caller connects to it, and looks the name up no more."""
    assert address(names(github_com=[PUBLIC]), "github.com") == PUBLIC


@pytest.mark.parametrize(
    "inside",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "fe80::1%eth0", "fc00::1", "ff02::1", "::", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::7f00:1", "2002:7f00:1::", ENGINE,
    ],
)  # fmt: skip
def test_an_allowed_name_that_points_inside_is_refused(inside: str) -> None:
    """Loopback, private, link-local, multicast, reserved, any of these within IPv6, and the engine."""
    with pytest.raises(Forbidden, match=r"github\.com"):
        address(names(github_com=[inside]), "github.com")


def test_of_several_addresses_one_that_is_out_there_is_taken() -> None:
    """An address inside is never the one that is connected to."""
    assert address(names(github_com=["127.0.0.1", PUBLIC]), "github.com") == PUBLIC


def test_a_name_that_changes_its_address_gains_nothing() -> None:
    """Each look-up is checked for itself."""
    answers = iter([[PUBLIC], [ENGINE], ["127.0.0.1"], [ENGINE]])

    async def rebinding(host: str, port: int) -> Sequence[str]:
        return next(answers)

    egress = Egress(("github.com",), "http://engine.example", rebinding)
    assert address(egress, "github.com") == PUBLIC
    with pytest.raises(Forbidden):
        address(egress, "github.com")


def test_a_host_that_is_not_allowed_is_not_even_looked_up() -> None:
    """A name can carry data out."""
    with pytest.raises(Forbidden, match="polar_allow_hosts"):
        address(names(), "secret.evil.org")


def test_a_name_that_does_not_resolve_is_refused() -> None:
    """With the resolver's own words."""
    with pytest.raises(Forbidden, match="not known"):
        address(names(), "github.com")


@pytest.mark.parametrize("ip", [PUBLIC, "2606:50c0:8000::153", "64:ff9b::8c52:7904", "2002:8c52:7904::"])
def test_an_address_of_the_world_is_public(ip: str) -> None:
    """Also within IPv6."""
    assert is_public(ip)


def test_more_hosts_are_checked_as_the_others() -> None:
    """A session's own hosts: for it, and by the same rules."""
    plain = names(example_org=[PUBLIC], intranet_org=["10.0.0.1"])
    more = plain.also(["example.org", "intranet.org"])
    assert (plain.allows("example.org"), more.allows("example.org"), more.allows("github.com")) == (False, True, True)
    assert address(more, "example.org") == PUBLIC
    with pytest.raises(Forbidden):
        address(more, "intranet.org")


def test_the_systems_resolver_gives_addresses() -> None:
    """IPv4 first."""
    assert asyncio.run(resolve("localhost", 80))[0] == "127.0.0.1"
