"""The environment variables under which an unmodified harness talks to a run's interceptor.

Invariant: the same set works for every harness (no harness needs a variable of its own to be intercepted), and no
variable holds a real key. It starts nothing.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import shlex
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import certifi

from polar_mitm import identity
from polar_toolkit.errors import Refusal, UnreadableFile

_BUNDLE, _CA, _CERTIFICATES = "ca-bundle.pem", "ca.pem", "certificates"
_BUNDLE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "CODEX_CA_CERTIFICATE")
_KEY_VARIABLES = ("OPENAI_API_KEY", "CODEX_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "OPENROUTER_API_KEY")
_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/cert.pem",  # Alpine, macOS
)


@dataclass(frozen=True, slots=True)
class Proxy:
    """Where the interceptor of a run listens: the contents of RUN/proxy.json."""

    host: str
    port: int
    ca: Path
    """The interceptor's CA certificate, PEM."""
    pid: int
    gateway: str = ""
    """URL of the gateway behind it, for this machine only."""
    listen_host: str = ""
    """The address at which it was told to listen, so that others may connect; "" when it lets only this machine in."""

    def reachable(self, timeout_s: float = 2.0) -> bool:
        """Whether something accepts connections there."""
        try:
            socket.create_connection((self.host, self.port), timeout_s).close()
        except OSError:  # refused, unroutable or timed out: not reachable is the answer
            return False
        return True


def read_proxy(run: Path) -> Proxy:
    """The interceptor of a run. Raises Refusal when it never ran, UnreadableFile when the file is broken."""
    path = run / "proxy.json"
    if not path.is_file():
        raise Refusal(
            f"no interceptor has run for {run} ({path} is missing); start it with: "
            f"mitmdump -s addons/polar.py --set polar_run={run} --set polar_engine=URL"
        )
    try:
        info: dict[str, Any] = json.loads(path.read_text())  # Any: JSON values
        host = "127.0.0.1" if info["host"] in ("", "0.0.0.0", "::", "*") else str(info["host"])
        told = str(info.get("gateway", "")), str(info.get("listen_host", ""))
        return Proxy(host, int(info["port"]), Path(info["ca"]), int(info["pid"]), *told)
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableFile(f"{path} is malformed ({error!r}); restart the interceptor") from error


def variables(
    run: Path, session: str | None, group: str | None, *, proxy_host: str = "", certificates: str = ""
) -> dict[str, str]:
    """The variables for one session, registered by this call; without a session, the run's default one.

    For a container or another machine: `proxy_host`, the name or address by which it reaches this one, and
    `certificates`, the folder in which RUN/certificates is seen there. Writes RUN/ca-bundle.pem, or RUN/certificates.
    Raises Refusal when the interceptor does not run or lets that machine not in, or the name cannot be registered.
    """
    proxy = read_proxy(run)
    if not proxy.reachable():
        raise Refusal(
            f"the interceptor of {run} does not run (nothing listens at {proxy.host}:{proxy.port}); start it with: "
            f"mitmdump -s addons/polar.py --set polar_run={run} --set polar_engine=URL"
        )
    if session is None and group is not None:
        raise Refusal(f"--group {group!r} needs --session: a group is made of named sessions")
    if proxy_host and not _is_loopback(proxy_host) and _is_loopback(proxy.listen_host or "localhost"):
        raise Refusal(
            f"the interceptor of {run} lets only this machine in, so {proxy_host!r} leads nobody to it: start it with "
            "--listen-host ADDRESS, the address by which containers or others reach this machine (0.0.0.0 for each)"
        )
    host = proxy_host or proxy.host
    url = f"http://{_credentials(run, session, group)}{f'[{host}]' if ':' in host else host}:{proxy.port}"
    if certificates:
        write_certificates(run, proxy.ca)
        inside = certificates.rstrip("/")
        return {**proxied(url), **trust(f"{inside}/{_BUNDLE}", f"{inside}/{_CA}")}
    return {**proxied(url), **trust(str(write_bundle(run, proxy.ca)), str(proxy.ca.resolve()))}


def proxied(url: str) -> dict[str, str]:
    """The variables that name a proxy."""
    local = "localhost,127.0.0.1,::1"
    names = {"HTTPS_PROXY": url, "HTTP_PROXY": url, "NO_PROXY": local}
    return {**names, **{name.lower(): value for name, value in names.items()}, "NODE_USE_ENV_PROXY": "1"}


def trust(bundle: str, ca: str) -> dict[str, str]:
    """The variables that do not name the proxy, all that a harness needs where its connections are led there anyhow.

    `bundle`: path of the system's certificates with the interceptor's; `ca`: path of the interceptor's alone.
    """
    return {
        "NODE_EXTRA_CA_CERTS": ca,
        **dict.fromkeys(_BUNDLE_VARIABLES, bundle),
        **dict.fromkeys(_KEY_VARIABLES, "dummy"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def write_bundle(run: Path, ca: Path) -> Path:
    """RUN/ca-bundle.pem: the system's certificates and the interceptor's, since the variables replace the store."""
    return _write((run / _BUNDLE).resolve(), _bundle(ca))


def write_certificates(run: Path, ca: Path) -> Path:
    """RUN/certificates, to be mounted elsewhere: the same bundle and the interceptor's certificate alone, no key."""
    folder = (run / _CERTIFICATES).resolve()
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)  # whoever runs inside a container reads it; RUN itself is closed to others
    for name, text in ((_BUNDLE, _bundle(ca)), (_CA, ca.read_text())):
        _write(folder / name, text).chmod(0o644)
    return folder


def as_shell(names: dict[str, str]) -> str:
    """Lines for `eval` in sh, bash and zsh."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in names.items())


def as_env_file(names: dict[str, str]) -> str:
    """Lines for `docker run --env-file`, which takes values as they are."""
    return "".join(f"{name}={value}\n" for name, value in names.items())


def _credentials(run: Path, session: str | None, group: str | None) -> str:
    if session is None:
        return ""
    try:
        secret = identity.register(run, session, group)
    except ValueError as error:
        raise Refusal(str(error)) from error
    return f"{quote(session, safe='')}:{quote(secret, safe='')}@"


def _bundle(ca: Path) -> str:
    if not ca.is_file():
        raise Refusal(f"the interceptor's certificate {ca} does not exist; restart the interceptor")
    return f"{_system_bundle().read_text().rstrip()}\n{ca.read_text()}"


def _write(path: Path, text: str) -> Path:
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")  # several sessions may start at once
    fresh.write_text(text)
    return fresh.replace(path)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _system_bundle() -> Path:
    """Not through SSL_CERT_FILE: a shell that evaluated these variables before has it set to our own bundle."""
    own = ssl.get_default_verify_paths().openssl_cafile
    found = next((path for path in (own, *_SYSTEM_BUNDLES) if Path(path).is_file()), None)
    return Path(found or certifi.where())
