"""The mitmproxy addon: options, thin hooks, and the guard that lets no packet out.

Invariant: a connection leaves for the gateway or for a host the user allowed, for nothing else; credentials are taken
off a request before it goes on. Hooks do no tokenising and no disk I/O.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import json
import logging
import os
import secrets
from pathlib import Path
from typing import Any

from mitmproxy import connection, ctx, exceptions, http
from mitmproxy.addonmanager import Loader
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from polar_mitm.errors import EngineUnavailable, PolarError
from polar_mitm.gateway import SECRET_HEADERS, Gateway, Server, find_dialect, listen, not_found, server
from polar_mitm.options import OPTIONS, Options, Run, open_run, write_json

_LOG = logging.getLogger("polar")
_QUIET = ("httpx", "httpcore", "uvicorn.error", "asyncio", "urllib3", "renderers.base")  # the root logger is at DEBUG
_DEFAULTS: dict[str, Any] = {  # Any: mitmproxy option values
    "connection_strategy": "lazy",  # no connection before a request is known
    "upstream_cert": False,  # and none to copy a certificate
    "http2": False,  # an HTTP/2 client would share five gateway connections (mitmproxy issue 8322)
    "flow_detail": 0,
    "body_size_limit": "256m",
}


class Polar:
    """One run behind a proxy."""

    def __init__(self) -> None:
        self._options: Options | None = None
        self._run: Run | None = None
        self._gateway = ("127.0.0.1", 0)
        self._secret = secrets.token_urlsafe(18)
        self._credentials: dict[str, tuple[str, str]] = {}
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    # -- life

    def load(self, loader: Loader) -> None:
        """Declare the options."""
        for name, kind, default, text in OPTIONS:
            loader.add_option(name, str if kind is float else kind, str(default) if kind is float else default, text)
        ctx.options.update(**{k: v for k, v in _DEFAULTS.items() if not ctx.options.has_changed(k)})
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)

    def configure(self, updated: set[str]) -> None:
        """Check the options as a whole; they are turned into values once."""
        forged = [n for n, o in ctx.options.items() if n.startswith("emudhra") and o.current()]
        if forged:
            raise exceptions.OptionsError(f"{forged[0]} signs with a compromised public CA key: unset it")
        if not updated & {name for name, *_ in OPTIONS} or (self._run and updated):
            return
        if ctx.options.polar_engine:
            self._options = self._read_options()

    async def running(self) -> None:
        """Open the run, start the gateway, and say where everything is."""
        try:
            options = self._options or self._read_options()
            self._options, self._run = options, await open_run(options)
            await self._check_engine(self._run)
        except (PolarError, OSError, ValueError, exceptions.OptionsError) as error:
            _LOG.error("polar: %s", error)  # mitmproxy's error check then ends the program with exit code 1
            ctx.master.shutdown()
            return
        listener = listen("127.0.0.1", 0)
        self._gateway = listener.getsockname()
        self._server = server(Gateway(self._run.desk, self._secret))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._ready.set()
        self._announce(options)

    async def done(self) -> None:
        """End and record what is in flight, seal the journal."""
        if self._run is not None:
            await self._run.close()
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True

    # -- traffic

    def http_connect(self, flow: http.HTTPFlow) -> None:
        """Remember whose connection this is: session and secret are the proxy URL's userinfo."""
        self._take_credentials(flow)

    def client_connected(self, client: connection.Client) -> None:
        """mitmdump listens everywhere unless told otherwise: other machines are let in only when it was told."""
        host = str(client.peername[0]).removeprefix("::ffff:")
        if not ctx.options.listen_host and not ipaddress.ip_address(host).is_loopback:
            client.error = "polar: only this machine may connect; start mitmdump with --listen-host to let others in"

    def client_disconnected(self, client: connection.Client) -> None:
        """Forget it."""
        self._credentials.pop(client.id, None)

    async def request(self, flow: http.HTTPFlow) -> None:
        """Send a model call to the gateway, answer everything else, pass on what the user allowed."""
        request = flow.request
        self._take_credentials(flow)
        host, path = request.pretty_host.lower(), request.path.split("?", 1)[0]
        if self._options and host in self._options.allowed:
            return
        if request.headers.get("upgrade", "").lower() == "websocket":
            flow.response = _json(
                426, {"error": {"message": "no WebSocket here: use POST", "type": "upgrade_required"}}
            )
        elif find_dialect(request.method, path) is None:
            flow.response = _json(404, not_found(request.method, path))
        else:
            await self._ready.wait()
            self._redirect(flow, host, path)

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """Answers of the gateway are passed on as they come."""
        if flow.response and (flow.request.host, flow.request.port) == self._gateway:
            flow.response.stream = True

    def server_connect(self, data: ServerConnectionHookData) -> None:
        """The egress guard."""
        address = data.server.address
        allowed = self._options.allowed if self._options else frozenset[str]()
        if address is None or (tuple(address[:2]) != self._gateway and address[0].lower() not in allowed):
            data.server.error = f"polar: connections to {address} are not allowed (option polar_allow_hosts)"

    # -- private

    def _read_options(self) -> Options:
        try:
            options = Options(**{name: kind(getattr(ctx.options, name)) for name, kind, *_ in OPTIONS})
            options.check()
        except ValueError as error:
            raise exceptions.OptionsError(str(error)) from error
        return options

    async def _check_engine(self, run: Run) -> None:
        """Refuse a wrong tokenizer now if the engine is up; an engine that is down is waited for at the first call."""
        try:
            await asyncio.wait_for(run.desk.ready(), 10)
        except (TimeoutError, EngineUnavailable):
            _LOG.warning("polar: the engine does not answer yet; calls will wait for it")

    def _announce(self, options: Options) -> None:
        proxy = ctx.master.addons.get("proxyserver")
        assert proxy is not None
        host, port = proxy.listen_addrs()[0][:2]
        ca = Path(ctx.options.confdir).expanduser() / "mitmproxy-ca-cert.pem"
        where = {
            "host": "127.0.0.1" if host in {"0.0.0.0", "::", ""} else host,
            "port": port,
            "ca": str(ca.resolve()),
            "gateway": f"http://{self._gateway[0]}:{self._gateway[1]}",
            "pid": os.getpid(),
        }
        write_json(options.run / "proxy.json", where)
        _LOG.info("polar: calls go to %s and are written to %s", options.polar_engine, options.run)
        _LOG.info('polar: in another terminal: eval "$(polar-toolkit env %s)"', options.run)

    def _take_credentials(self, flow: http.HTTPFlow) -> None:
        header = flow.request.headers.pop("proxy-authorization", "")
        if header.lower().startswith("basic "):
            try:
                name, _, secret = base64.b64decode(header[6:], validate=True).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                return  # not credentials: the call then belongs to nobody and is refused by the gateway
            self._credentials[flow.client_conn.id] = (name, secret)

    def _redirect(self, flow: http.HTTPFlow, host: str, path: str) -> None:
        request = flow.request
        request.decode(strict=False)
        for name in [*SECRET_HEADERS, *(n for n in request.headers if n.lower().startswith("x-polar-"))]:
            request.headers.pop(name, None)
        request.scheme, request.path = "http", path
        request.host, request.port = self._gateway
        request.headers["x-polar-gateway"] = self._secret
        request.headers["x-polar-host"] = host
        if credentials := self._credentials.get(flow.client_conn.id):
            request.headers["x-polar-user"], request.headers["x-polar-password"] = credentials


def _json(status: int, value: dict[str, Any]) -> http.Response:  # Any: JSON
    return http.Response.make(status, json.dumps(value), {"content-type": "application/json"})
