"""The mitmproxy addon: options, commands, thin hooks, and the guard that lets no packet out.

Invariant: a connection leaves for the gateway or for a host that the user allowed, the run or the session, at an
address that was checked, for nothing else; credentials are taken off a request before it goes on. Hooks do no
tokenising, and no disk I/O but to look whether sessions were registered.
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

from mitmproxy import command, connection, contentviews, ctx, exceptions, http
from mitmproxy.addonmanager import Loader
from mitmproxy.net.http.url import hostport
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from polar_mitm.asgi import Server, listen, server
from polar_mitm.contentview import CALL, PolarContentview
from polar_mitm.egress import Egress, Forbidden
from polar_mitm.errors import EngineUnavailable, JournalError, PolarError, Unauthorized
from polar_mitm.gateway import CALL_HEADER, SECRET_HEADERS, Gateway, not_found, session_key, upgrade_required
from polar_mitm.identity import Sessions
from polar_mitm.options import OPTIONS, Options, Run, open_run, write_json
from polar_mitm.routes import Match, Treatment, find, kept_query

_LOG = logging.getLogger("polar")
_QUIET = ("httpx", "httpcore", "uvicorn.error", "asyncio", "urllib3", "renderers.base")  # the root logger is at DEBUG
_DEFAULTS: dict[str, Any] = {  # Any: mitmproxy option values
    "connection_strategy": "lazy",  # no connection before a request is known
    "upstream_cert": False,  # and none to copy a certificate
    "flow_detail": 0,  # of mitmdump
    "body_size_limit": "2g",  # of what is passed through, too; the gateway has a bound of its own for calls
}
_GATEWAY_PORTS = 24
"""mitmproxy opens five connections to one address for one client (its issue 8322), and one for each stream of HTTP/2;
a client may have 100 streams."""
_ORIGIN = "polar_origin"
"""Key of a flow's metadata: scheme, host, port and path as the client asked for them."""


class Polar:
    """One run behind a proxy."""

    def __init__(self) -> None:
        self._options: Options | None = None
        self._egress = Egress((), "")
        self._sessions: Sessions | None = None
        self._run: Run | None = None
        self._gateways = [("127.0.0.1", 0)]
        self._secret = secrets.token_urlsafe(18)
        self._credentials: dict[str, tuple[str, str]] = {}
        self._turns: dict[str, int] = {}
        self._pinned: dict[tuple[str, str, int], str] = {}
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    # -- life

    def load(self, loader: Loader) -> None:
        """Declare the options."""
        for name, kind, default, text in OPTIONS:
            loader.add_option(name, str if kind is float else kind, str(default) if kind is float else default, text)
        unset = {k: v for k, v in _DEFAULTS.items() if k in ctx.options and not ctx.options.has_changed(k)}
        ctx.options.update(**unset)
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
            self._take(self._read_options())

    async def running(self) -> None:
        """Open the run, start the gateway, and say where everything is."""
        try:
            options = self._options or self._read_options()
            self._take(options)
            self._run = await open_run(options, keeps_rows=_keeps_flows())
            await self._check_engine(self._run)
        except (PolarError, OSError, ValueError, exceptions.OptionsError) as error:
            _LOG.error("polar: %s", error)  # mitmproxy's error check then ends the program with exit code 1
            ctx.master.shutdown()
            return
        listeners = [listen("127.0.0.1", 0) for _ in range(_GATEWAY_PORTS)]
        self._gateways = [listener.getsockname() for listener in listeners]
        self._server = server(Gateway(self._run.desk, self._secret))
        self._serving = asyncio.create_task(self._server.serve(sockets=listeners))
        if _keeps_flows():
            contentviews.add(PolarContentview(self._run.tally.row, self._run.desk.template.bytes_of))
        self._ready.set()
        self._announce(options)

    async def done(self) -> None:
        """End and record what is in flight, seal the journal."""
        if self._run is not None:
            await self._run.close()
        if self._server is not None:
            self._server.stop()

    # -- commands

    @command.command("polar.status")
    def status(self) -> str:
        """What was called, sampled and recorded since the start, and where."""
        if self._run is None or self._options is None:
            return "polar: not running yet"
        figures = ", ".join(f"{count} {name}" for name, count in self._run.tally.figures().items())
        described = self._run.desk.described
        engine = f"{described.model}, weights {described.weight_version}" if described else "not met yet"
        return f"polar: {figures}; engine {self._options.polar_engine} ({engine}); run folder {self._options.run}"

    @command.command("polar.flush")
    def flush(self) -> None:
        """Seal the finished calls into the run folder's calls/*.parquet now, not only at the end."""
        if self._run is not None:
            self._flushing = asyncio.ensure_future(self._flush(self._run))

    async def _flush(self, run: Run) -> None:
        try:
            await run.journal.flush()
        except JournalError as error:
            _LOG.error("polar: %s", error)
            return
        _LOG.info("polar: every finished call is in %s", run.desk.run / "calls")

    # -- traffic

    def http_connect(self, flow: http.HTTPFlow) -> None:
        """Remember whose connection this is: session and secret are the proxy URL's userinfo."""
        self._take_credentials(flow)

    def client_connected(self, client: connection.Client) -> None:
        """mitmdump listens everywhere unless told otherwise: other machines are let in only when it was told."""
        host = str(client.peername[0]).removeprefix("::ffff:")
        told = client.proxy_mode.listen_host(ctx.options.listen_host)
        if not told and not ipaddress.ip_address(host).is_loopback:
            client.error = "polar: only this machine may connect; start mitmdump with --listen-host to let others in"

    def client_disconnected(self, client: connection.Client) -> None:
        """Forget it."""
        self._credentials.pop(client.id, None)
        self._turns.pop(client.id, None)
        for key in [key for key in self._pinned if key[0] == client.id]:
            del self._pinned[key]

    async def request(self, flow: http.HTTPFlow) -> None:
        """Send what the table of routes answers to the gateway, refuse the rest, pass on what the user allowed."""
        request = flow.request
        self._take_credentials(flow)
        host = request.pretty_host.lower()
        egress = self._egress_of(flow.client_conn)
        if egress.allows(host):
            await self._pass_on(flow, host, egress)
            return
        path, _, query = request.path.partition("?")
        match = find(request.method, host, path, query, {n.lower(): v for n, v in request.headers.items()})
        if match.treatment is Treatment.WEBSOCKET:
            flow.response = _json(426, upgrade_required())
        elif match.treatment is Treatment.REFUSE:
            flow.response = _refusal(match, not_found(request.method, path))
        else:
            await self._ready.wait()
            self._redirect(flow, host)

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """Answers are passed on as they come; the flow then shows the request as the client made it."""
        if flow.response and flow.response.status_code != 101:
            flow.response.stream = True
        if flow.response and _ORIGIN in flow.metadata:
            flow.metadata[CALL] = flow.response.headers.pop(CALL_HEADER, "")
            _restore(flow)

    def response(self, flow: http.HTTPFlow) -> None:
        """mitmproxy keeps no body of a streamed answer: where flows are looked at, the plain form takes its place."""
        row = self._run.tally.row(flow.metadata[CALL]) if self._run and flow.metadata.get(CALL) else None
        if flow.response and flow.response.raw_content is None and row is not None and row.get("answer"):
            flow.response.headers["content-type"] = "application/json"
            flow.response.text = row["answer"]

    def error(self, flow: http.HTTPFlow) -> None:
        """Also a flow without an answer shows the request as the client made it."""
        if _ORIGIN in flow.metadata:
            _restore(flow)

    async def server_connect(self, data: ServerConnectionHookData) -> None:
        """The egress guard."""
        address = data.server.address
        if address is None:
            data.server.error = "polar: a connection without an address is not allowed"
        elif tuple(address[:2]) == self._gateways[0]:
            data.server.address = self._gateway_of(data.client)
        elif host := self._pinned.get((data.client.id, *address[:2])):
            data.server.sni = host  # the address was checked, and is an address: the certificate is the host's
        else:
            try:
                data.server.address = (await self._egress.address(*address[:2]), address[1])
            except Forbidden as error:
                data.server.error = f"polar: {error}"

    # -- private

    def _read_options(self) -> Options:
        try:
            options = Options(**{name: kind(getattr(ctx.options, name)) for name, kind, *_ in OPTIONS})
            options.check()
        except ValueError as error:
            raise exceptions.OptionsError(str(error)) from error
        return options

    def _take(self, options: Options) -> None:
        self._options, self._egress = options, Egress(options.allowed, options.polar_engine)
        self._sessions = Sessions(options.run)

    async def _check_engine(self, run: Run) -> None:
        """Refuse a wrong tokenizer now if the engine is up; an engine that is down is waited for at the first call."""
        try:
            await asyncio.wait_for(run.desk.ready(), 10)
        except (TimeoutError, EngineUnavailable):
            _LOG.warning("polar: the engine does not answer yet; calls will wait for it")

    def _announce(self, options: Options) -> None:
        proxy = ctx.master.addons.get("proxyserver")
        assert proxy is not None
        servers = sorted(proxy.servers, key=lambda s: s.mode.type_name != "regular")  # the first is for proxy variables
        host, port = servers[0].listen_addrs[0][:2]
        ca = Path(ctx.options.confdir).expanduser() / "mitmproxy-ca-cert.pem"
        where = {
            "host": "127.0.0.1" if host in {"0.0.0.0", "::", ""} else host,
            "port": port,
            "listen_host": servers[0].mode.listen_host(ctx.options.listen_host) or "",  # others are let in where it is
            "ca": str(ca.resolve()),
            "gateway": f"http://{self._gateways[0][0]}:{self._gateways[0][1]}",
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

    def _egress_of(self, client: connection.Client) -> Egress:
        """Where a client may go: the run's hosts, and those of its session while that is not over."""
        name, secret = self._credentials.get(client.id, (None, None))
        try:
            session = self._sessions.identify(name, secret, **_place(client)) if self._sessions else None
        except Unauthorized:  # the gateway tells it, and records it
            return self._egress
        return self._egress.also(session.allow_hosts) if session and not session.sealed else self._egress

    async def _pass_on(self, flow: http.HTTPFlow, host: str, egress: Egress) -> None:
        """Address the request to a checked address of its host; `server_connect` gives the host back as the SNI.

        Changing the address later, when it is connected to, would keep mitmproxy from using a connection again.
        """
        request = flow.request
        authority = request.host_header or hostport(request.scheme, host, request.port)
        try:
            address = await egress.address(host, request.port)
        except Forbidden as error:
            flow.response = _json(502, {"error": {"message": f"polar: {error}", "type": error.kind}})
            return
        self._pinned[(flow.client_conn.id, address, request.port)] = host
        request.host = address
        request.host_header = authority

    def _gateway_of(self, client: connection.Client) -> tuple[str, int]:
        """A stream of HTTP/2 has a connection of its own, on the next port; HTTP/1 uses the first again and again."""
        if client.alpn != b"h2":
            return self._gateways[0]
        self._turns[client.id] = turn = self._turns.get(client.id, -1) + 1
        return self._gateways[turn % len(self._gateways)]

    def _redirect(self, flow: http.HTTPFlow, host: str) -> None:
        request, client = flow.request, flow.client_conn
        path, _, query = request.path.partition("?")
        path = path + ("?" + kept if (kept := kept_query(query)) else "")
        flow.metadata[_ORIGIN] = [request.scheme, request.host, request.port, request.host_header, path]
        flow.metadata[CALL] = ""
        key = session_key(request.headers)
        for name in [*SECRET_HEADERS, *(n for n in request.headers if n.lower().startswith("x-polar-"))]:
            request.headers.pop(name, None)
        request.scheme, request.path = "http", path
        request.host, request.port = self._gateways[0]
        request.headers["x-polar-gateway"] = self._secret
        request.headers["x-polar-host"] = host
        request.headers.update({f"x-polar-{name}": value for name, value in _place(client).items()})
        if credentials := self._credentials.get(client.id):
            request.headers["x-polar-user"], request.headers["x-polar-password"] = credentials
        elif key:
            request.headers["x-polar-key"] = key


def _keeps_flows() -> bool:
    """Whether somebody can look at flows: in mitmproxy and mitmweb, not in mitmdump."""
    return ctx.master.addons.get("view") is not None


def _place(client: connection.Client) -> dict[str, str]:
    """By what a client without credentials may be known."""
    return {"mode": client.proxy_mode.full_spec, "address": str(client.peername[0]).removeprefix("::ffff:")}


def _restore(flow: http.HTTPFlow) -> None:
    request = flow.request
    request.scheme, request.host, request.port, request.host_header, request.path = flow.metadata.pop(_ORIGIN)
    for name in [n for n in request.headers if n.lower().startswith("x-polar-")]:
        del request.headers[name]


def _refusal(match: Match, error: PolarError) -> http.Response:
    return _json(match.dialect.status(error), match.dialect.error(error))


def _json(status: int, value: dict[str, Any]) -> http.Response:  # Any: JSON
    return http.Response.make(status, json.dumps(value), {"content-type": "application/json"})
