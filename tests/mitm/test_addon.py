"""The face to mitmproxy: options, hooks one by one, and one real mitmdump whose evidence many tests read."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import warnings
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from mitmproxy import connection, exceptions, http
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from polar_mitm.egress import Egress
from polar_mitm.identity import register, seal
from polar_mitm.journal import read_calls
from polar_mitm.options import OPTIONS
from polar_toolkit.rollout.harnesses.scripted_engine import Fault, ScriptedEngine
from tests.mitm.house import eventually
from tests.mitm.protocols import ANTHROPIC, CHAT, RESPONSES

with warnings.catch_warnings():  # mitmproxy 12.2.3 uses names that pyparsing deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from mitmproxy.addons import dumper, proxyserver
    from mitmproxy.test import taddons, tflow

    from polar_mitm.addon import Polar

ROOT = Path(__file__).parents[2]
ENGINE = "http://127.0.0.1:30000"
PUBLIC = "140.82.121.4"


@contextmanager
def addon(**options: str) -> Generator[Polar]:
    """The addon with these options, its gateway said to be at 127.0.0.1:4444."""
    polar = Polar()
    with taddons.context(dumper.Dumper(), proxyserver.Proxyserver(), polar) as tctx:
        tctx.configure(polar, **({"polar_engine": ENGINE} | options))
        polar._gateways = [("127.0.0.1", 4444)]  # pyright: ignore[reportPrivateUsage] - running() would open a run
        polar._ready.set()  # pyright: ignore[reportPrivateUsage] - the same
        yield polar


def model_call(**headers: str) -> http.HTTPFlow:
    """A flow that a harness sends to a provider."""
    request = http.Request.make(
        "POST", "https://api.openai.com/v1/chat/completions?key=secret", b"{}",
        {name.replace("_", "-"): value for name, value in headers.items()},
    )  # fmt: skip
    return tflow.tflow(req=request)


def sent(polar: Polar, flow: http.HTTPFlow) -> http.HTTPFlow:
    """The flow after the request hook."""
    asyncio.run(polar.request(flow))
    return flow


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("polar_engine", "localhost:30000"), ("polar_wait", "-1"), ("polar_wait", "soon"),
        ("polar_sampling", "{"), ("polar_sampling", '{"temp": 1}'),
    ],
)  # fmt: skip
def test_a_bad_option_is_refused_when_it_is_set(name: str, value: str) -> None:
    """mitmproxy's own error, so that `mitmdump` ends with one sentence."""
    with pytest.raises(exceptions.OptionsError), addon(**{name: value}):
        pass


def test_an_option_of_the_compromised_ca_is_refused() -> None:
    """mitmproxy 12.3 has options that sign with a public key: a set one ends the start."""
    polar = Polar()
    with taddons.context(dumper.Dumper(), proxyserver.Proxyserver(), polar) as tctx:
        tctx.options.add_option("emudhra_signing", str, "", "signs")
        tctx.configure(polar)
        with pytest.raises(exceptions.OptionsError, match="emudhra_signing"):
            tctx.configure(polar, emudhra_signing="on")


def test_no_connection_is_made_before_a_request_is_known() -> None:
    """Lazy connections, and none to copy a certificate."""
    polar = Polar()
    with taddons.context(dumper.Dumper(), proxyserver.Proxyserver(), polar) as tctx:
        assert (tctx.options.connection_strategy, tctx.options.upstream_cert) == ("lazy", False)


# --- hooks --------------------------------------------------------------------------------------------------------


def test_a_model_call_goes_to_the_gateway() -> None:
    """Over plain HTTP on loopback, without the query; the provider's name goes along."""
    with addon() as polar:
        request = sent(polar, model_call()).request
    assert (request.scheme, request.host, request.port) == ("http", "127.0.0.1", 4444)
    assert request.path == "/v1/chat/completions"
    assert request.headers["x-polar-host"] == "api.openai.com"
    assert request.headers["x-polar-gateway"]


@pytest.mark.parametrize(
    "name", ["authorization", "x_api_key", "api_key", "x_goog_api_key", "cookie", "proxy_authorization"]
)
def test_a_credential_is_taken_off_a_model_call(name: str) -> None:
    """It would be of no use behind, and must not be written."""
    with addon() as polar:
        request = sent(polar, model_call(**{name: "Bearer sk-secret"})).request
    assert "sk-secret" not in str(request.headers)
    assert "secret" not in request.url


def test_a_client_cannot_speak_for_the_proxy() -> None:
    """Its own x-polar-* headers are dropped, whatever their case."""
    forged = {"x_polar_user": "alice", "X_Polar_Password": "x", "x_polar_host": "evil", "X_POLAR_GATEWAY": "guess"}
    with addon() as polar:
        headers = sent(polar, model_call(**forged)).request.headers
    assert "x-polar-user" not in headers
    assert "x-polar-password" not in headers
    assert (headers["x-polar-host"], headers["x-polar-gateway"] != "guess") == ("api.openai.com", True)


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_the_session_is_the_user_of_the_proxy_url() -> None:
    """Seen at CONNECT, and valid for every request of that connection."""
    flow = model_call()
    connect = tflow.tflow(req=http.Request.make("CONNECT", "https://api.openai.com:443", b"", {}))
    connect.request.headers["proxy-authorization"] = basic("alice:se:cret")
    connect.client_conn = flow.client_conn
    with addon() as polar:
        polar.http_connect(connect)
        headers = sent(polar, flow).request.headers
    assert "proxy-authorization" not in connect.request.headers
    assert (headers["x-polar-user"], headers["x-polar-password"]) == ("alice", "se:cret")


def test_the_session_of_a_plain_proxy_request_stands_in_the_request() -> None:
    """Without TLS there is no CONNECT."""
    with addon() as polar:
        headers = sent(polar, model_call(proxy_authorization=basic("bob:x"))).request.headers
    assert (headers["x-polar-user"], headers["x-polar-password"]) == ("bob", "x")


def test_a_connection_that_closed_is_forgotten() -> None:
    """Another connection does not inherit its session."""
    flow = model_call(proxy_authorization=basic("bob:x"))
    with addon() as polar:
        sent(polar, flow)
        polar.client_disconnected(flow.client_conn)
        again = model_call()
        again.client_conn = flow.client_conn
        assert "x-polar-user" not in sent(polar, again).request.headers


@pytest.mark.parametrize("header", ["Basic !!!", "Basic /w==", "Bearer x"])
def test_garbled_credentials_are_nobodys(header: str) -> None:
    """No error: the gateway refuses the call of a run with registered sessions."""
    with addon() as polar:
        assert "x-polar-user" not in sent(polar, model_call(proxy_authorization=header)).request.headers


@pytest.mark.parametrize(
    ("url", "keys"),
    [
        ("https://api.openai.com/v1/embeddings", {"message", "type", "param", "code"}),
        ("https://api.anthropic.com/api/claude_code/settings", {"type", "message"}),
        ("https://generativelanguage.googleapis.com/v1beta/files", {"code", "message", "status"}),
    ],
)
def test_what_is_no_model_call_is_answered_at_once(url: str, keys: set[str]) -> None:
    """A 404 in JSON, as that provider says it: the fastest answer for every harness."""
    flow = tflow.tflow(req=http.Request.make("GET", url))
    with addon() as polar:
        response = sent(polar, flow).response
    assert response
    assert (response.status_code, response.headers["content-type"]) == (404, "application/json")
    assert json.loads(response.content or b"")["error"].keys() == keys


def test_a_websocket_is_refused_with_an_upgrade_error() -> None:
    """Codex then posts."""
    request = http.Request.make(
        "GET", "https://api.openai.com/v1/responses", b"", {"Upgrade": "WebSocket", "Sec-WebSocket-Key": "x"}
    )
    with addon() as polar:
        response = sent(polar, tflow.tflow(req=request)).response
    assert response
    assert response.status_code == 426


def reaching(polar: Polar, host: str, *addresses: str) -> None:
    """Let this one name resolve to these addresses, and be allowed."""

    async def look_up(name: str, port: int) -> list[str]:
        return [*addresses] if name == host else []

    polar._egress = Egress((host,), ENGINE, look_up)  # pyright: ignore[reportPrivateUsage] - no DNS in a test


def connecting(polar: Polar, address: tuple[Any, ...] | None, flow: http.HTTPFlow | None = None) -> connection.Server:
    """The connection after the guard."""
    client = flow.client_conn if flow else tflow.tclient_conn()
    data = ServerConnectionHookData(server=connection.Server(address=address), client=client)
    asyncio.run(polar.server_connect(data))
    return data.server


def to_github(**headers: str) -> http.HTTPFlow:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return tflow.tflow(req=http.Request.make("POST", "https://github.com/v1/chat/completions", b"{}", named))


def test_an_allowed_host_is_passed_through_untouched() -> None:
    """Its own credentials are its own business; ours are taken off."""
    with addon() as polar:
        reaching(polar, "github.com", PUBLIC)
        flow = sent(polar, to_github(authorization="token x", proxy_authorization=basic("bob:x")))
    assert flow.response is None
    assert flow.request.headers.get("authorization") == "token x"
    assert "proxy-authorization" not in flow.request.headers
    assert "x-polar-gateway" not in flow.request.headers


def test_an_allowed_host_is_connected_to_where_it_was_checked() -> None:
    """Host and certificate stay the name's, so that mitmproxy can use a connection again."""
    with addon() as polar:
        reaching(polar, "github.com", PUBLIC)
        flow = sent(polar, to_github())
        server = connecting(polar, (PUBLIC, 443), flow)
        strange = connecting(polar, (PUBLIC, 443))
    assert (flow.request.host, flow.request.pretty_host) == (PUBLIC, "github.com")
    assert (server.address, server.sni, server.error) == ((PUBLIC, 443), "github.com", None)
    assert strange.error  # another client's check does not count


def test_an_allowed_host_that_points_inside_is_refused() -> None:
    """The name is the user's choice, the address whoever runs its DNS chose."""
    with addon() as polar:
        reaching(polar, "github.com", "169.254.169.254")
        flow = sent(polar, to_github())
        tunnel = connecting(polar, ("github.com", 22))
    assert flow.response
    assert flow.response.status_code == 502
    assert "github.com" in flow.response.text
    assert "169.254.169.254" in (tunnel.error or "")


def test_a_tunnel_to_an_allowed_host_goes_to_the_address_that_was_checked() -> None:
    """What is not HTTP is connected to by the name."""
    with addon() as polar:
        reaching(polar, "github.com", PUBLIC)
        assert connecting(polar, ("github.com", 22)).address == (PUBLIC, 22)


def test_a_sessions_own_host_is_passed_through_for_it_alone(tmp_path: Path) -> None:
    """Registered with it, by the checks of every other, and no longer than it lasts."""
    alice, bob = register(tmp_path, "alice", allow_hosts=["github.com"]), register(tmp_path, "bob")
    with addon(polar_run=str(tmp_path)) as polar:
        reaching(polar, "github.com", PUBLIC)
        polar._egress = Egress((), ENGINE, polar._egress._resolve)  # pyright: ignore[reportPrivateUsage] - no DNS in a test

        def goes(user: str) -> bool:
            return sent(polar, to_github(proxy_authorization=basic(user))).request.host == PUBLIC

        assert [goes(f"alice:{alice}"), goes("alice:guess"), goes(f"bob:{bob}")] == [True, False, False]
        seal(tmp_path, "alice")
        assert not goes(f"alice:{alice}")


@pytest.mark.parametrize(
    ("address", "goes"),
    [
        (("127.0.0.1", 4444), True), (("api.openai.com", 443), False), (("127.0.0.1", 30000), False),
        (("evil.github.com", 443), False), (("::1", 4444, 0, 0), False), ((PUBLIC, 443), False), (None, False),
    ],
)  # fmt: skip
def test_a_connection_leaves_for_the_gateway_and_for_allowed_hosts_only(
    address: tuple[Any, ...] | None, *, goes: bool
) -> None:
    """The guard stands at the last place before the socket."""
    with addon() as polar:
        reaching(polar, "github.com", PUBLIC)
        assert (connecting(polar, address).error is None) is goes


def test_without_options_no_connection_leaves() -> None:
    """Also before the addon was configured."""
    assert connecting(Polar(), ("api.openai.com", 443)).error


def test_a_stream_of_http2_has_a_gateway_port_of_its_own() -> None:
    """mitmproxy opens no more than five connections to one address for one client."""
    flow = model_call()
    with addon() as polar:
        polar._gateways = [("127.0.0.1", 4444 + i) for i in range(24)]  # pyright: ignore[reportPrivateUsage] - as running() does
        plain = {connecting(polar, ("127.0.0.1", 4444), flow).address for _ in range(48)}
        flow.client_conn.alpn = b"h2"
        ports = [connecting(polar, ("127.0.0.1", 4444), flow).address for _ in range(48)]
    assert plain == {("127.0.0.1", 4444)}
    assert [ports.count(port) for port in {*ports}] == [2] * 24


@pytest.mark.parametrize(
    ("peer", "listen_host", "enters"),
    [
        ("127.0.0.1", "", True), ("::1", "", True), ("::ffff:127.0.0.1", "", True), ("192.0.2.7", "", False),
        ("192.0.2.7", "0.0.0.0", True),
    ],
)  # fmt: skip
def test_other_machines_enter_only_when_mitmdump_listens_for_them(peer: str, listen_host: str, *, enters: bool) -> None:
    """mitmdump listens everywhere by default."""
    client = tflow.tclient_conn()
    client.peername = (peer, 50000)
    with addon(listen_host=listen_host) as polar:
        polar.client_connected(client)
    assert (client.error is None) is enters


def test_the_gateways_answers_are_streamed() -> None:
    """Bytes go on as they come."""
    with addon() as polar:
        flow = sent(polar, model_call())
        flow.response = http.Response.make(200)
        polar.responseheaders(flow)
    assert flow.response.stream


# --- a real mitmdump ----------------------------------------------------------------------------------------------

SECRET = "sk-very-secret"


@dataclass
class Evidence:
    """What one mitmdump did, from its start to SIGTERM in the middle of a call."""

    run: Path
    pid: int
    secret: str
    answers: dict[str, httpx.Response] = field(default_factory=dict[str, httpx.Response])
    where: dict[str, Any] = field(default_factory=dict[str, Any])
    cut: bytes = b""
    """What the client of the last call received."""
    broke: str = ""
    """How its stream ended."""
    status: int | None = None
    """Exit status."""


@pytest.fixture(scope="module")
def evidence(bytes_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Start mitmdump with the addon once, send it everything, and end it in the middle of a call."""
    folder = tmp_path_factory.mktemp("mitmdump")
    run = folder / "run"
    run.mkdir()
    secret = register(run, "alice", "g")
    with ScriptedEngine(bytes_folder, lambda _: "one two three four five six seven eight nine ten").serving() as engine:
        options = {"polar_allow_hosts": "allowed.invalid"}
        with mitm("mitmdump", folder, engine, "-p", "0", **options) as process:
            found = Evidence(run, process.pid, secret)
            _use(found, engine, process)
    return found


@contextmanager
def mitm(
    program: str, folder: Path, engine: ScriptedEngine, *arguments: str, **options: str
) -> Generator[subprocess.Popen[bytes]]:
    """One of mitmproxy's programs with the addon, run folder FOLDER/run, killed behind the block."""
    settings = {"polar_engine": engine.url, "polar_run": folder / "run", "confdir": folder / "confdir", **options}
    command = [str(Path(sys.executable).parent / program), "-s", str(ROOT / "addons" / "polar.py"), *arguments]
    command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    at_once = os.environ | {"PYTHONUNBUFFERED": "1"}  # a log that is a file waits for its buffer to fill
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, env=at_once) as process:
        try:
            eventually(lambda: (folder / "run" / "proxy.json").exists() or process.poll() is not None, 60)
            assert process.poll() is None, (folder / "log").read_text()
            yield process
        finally:
            process.kill()


def _use(found: Evidence, engine: ScriptedEngine, process: subprocess.Popen[bytes]) -> None:
    found.where = json.loads((found.run / "proxy.json").read_text())
    proxy = f"http://alice:{found.secret}@{found.where['host']}:{found.where['port']}"
    trust = ssl.create_default_context(cafile=found.where["ca"])
    url, body = f"https://api.openai.com{CHAT.path}?key={SECRET}", json.dumps(CHAT.ask("Count.")).encode()
    headers = {"authorization": f"Bearer {SECRET}", "cookie": SECRET, "user-agent": "pi/1"}
    packed = {"gzip": gzip.compress(body), "zstd": pa.Codec("zstd").compress(body, asbytes=True)}
    with httpx.Client(proxy=proxy, verify=trust, trust_env=False, timeout=30, headers=headers) as client:
        for name, content in packed.items():
            found.answers[name] = client.post(url, content=content, headers={"content-encoding": name})
        found.answers["other"] = client.get("https://api.openai.com/v1/files")
        found.answers["plain HTTP"] = client.post(f"http://api.openai.com{RESPONSES.path}", json=RESPONSES.ask("Hi."))
        engine.faults.append(Fault("hold", after=40))
        with client.stream("POST", url, json=CHAT.ask("Count.", stream=True)) as response:
            assert engine.holding.wait(30)
            try:
                for piece in response.iter_bytes():
                    found.cut += piece
                    if b"seven" in b"".join(re.findall(rb'"content":"([^"]*)"', found.cut)):
                        process.send_signal(signal.SIGTERM)
            except httpx.HTTPError as error:
                found.broke = repr(error)
    found.status = process.wait(30)


def rows(found: Evidence) -> list[dict[str, Any]]:
    return read_calls(found.run).to_pylist()


@pytest.mark.parametrize("packed", ["gzip", "zstd"])
def test_a_compressed_call_over_tls_is_answered(evidence: Evidence, packed: str) -> None:
    """The client trusts the CA of proxy.json, and believes to talk to its provider."""
    answer = evidence.answers[packed]
    assert answer.status_code == 200
    assert CHAT.said(answer.json())[0].startswith("one two three")


def test_the_proxy_says_where_it_is(evidence: Evidence) -> None:
    """For `polar-toolkit env`: address, CA, gateway and process."""
    assert evidence.where["pid"] == evidence.pid
    assert evidence.where["host"] == "127.0.0.1"
    assert evidence.where["gateway"].startswith("http://127.0.0.1:")
    assert Path(evidence.where["ca"]).is_file()


def test_every_other_request_is_a_404(evidence: Evidence) -> None:
    """From the proxy itself."""
    assert evidence.answers["other"].status_code == 404


def test_a_call_without_tls_is_answered_too(evidence: Evidence) -> None:
    """A plain proxy request."""
    assert RESPONSES.said(evidence.answers["plain HTTP"].json())[0].startswith("one two three")


def test_rows_hold_the_session_and_the_provider(evidence: Evidence) -> None:
    """As the proxy URL and the request say."""
    assert {(r["session_id"], r["group_id"], r["host"]) for r in rows(evidence)} == {("alice", "g", "api.openai.com")}


def test_sigterm_seals_the_journal(evidence: Evidence) -> None:
    """Every call is in Parquet, and no journal is left."""
    assert evidence.status == 0
    assert list((evidence.run / "journal").iterdir()) == []
    assert len(list((evidence.run / "calls").glob("*.parquet"))) == 1


def test_sigterm_records_the_call_in_flight(evidence: Evidence) -> None:
    """With the tokens that were sampled; its client is told, in a terminal error."""
    *finished, last = rows(evidence)
    assert [row["status"] for row in finished] == ["completed"] * 3
    assert (last["status"], len(last["output_ids"]), last["client_delivered"]) == ("aborted", 40, False)
    assert b"[DONE]" not in evidence.cut
    assert b"the interceptor is being stopped" in evidence.cut
    assert not evidence.broke


def test_no_secret_is_in_the_run_folder(evidence: Evidence) -> None:
    """Neither the harness's key nor the session's secret, outside the file of secrets."""
    assert (evidence.run.stat().st_mode & 0o777) == 0o700
    text = json.dumps(rows(evidence), default=str)
    files = b"".join(p.read_bytes() for p in evidence.run.rglob("*.json"))
    for secret in (SECRET, evidence.secret):
        assert secret not in text
        assert secret.encode() not in files


# --- ways in ------------------------------------------------------------------------------------------------------


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [listener.getsockname()[1] for listener in taken]


def through_socks(port: int, host: str, trust: ssl.SSLContext, body: bytes) -> bytes:
    """The answer to a call through a SOCKS5 proxy."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
        raw.sendall(b"\x05\x01\x00")
        assert raw.recv(2) == b"\x05\x00"
        raw.sendall(b"\x05\x01\x00\x03" + bytes([len(host)]) + host.encode() + (443).to_bytes(2, "big"))
        assert raw.recv(10)[:2] == b"\x05\x00"
        with trust.wrap_socket(raw, server_hostname=host) as secure:
            head = (
                f"POST {CHAT.path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            secure.sendall(head.encode() + body)
            return b"".join(iter(lambda: secure.recv(65536), b""))


@pytest.fixture(scope="module")
def ways(bytes_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The rows, by session, of calls that came into one mitmdump by three modes; a session for each mode."""
    folder = tmp_path_factory.mktemp("modes")
    (folder / "run").mkdir()
    regular, reverse, socks = free_ports(3)
    modes = {
        "regular": f"regular@127.0.0.1:{regular}",
        "reverse": f"reverse:https://api.openai.com@127.0.0.1:{reverse}",
        "socks": f"socks5@127.0.0.1:{socks}",
    }
    for name, mode in modes.items():
        register(folder / "run", name, mode=mode)
    arguments = [word for mode in modes.values() for word in ("--mode", mode)]
    with (
        ScriptedEngine(bytes_folder, lambda _: "Hello.").serving() as engine,
        mitm("mitmdump", folder, engine, *arguments) as process,
    ):
        where = json.loads((folder / "run" / "proxy.json").read_text())
        assert where["port"] == regular
        trust = ssl.create_default_context(cafile=where["ca"])
        body = CHAT.ask("Hi.")
        with httpx.Client(proxy=f"http://127.0.0.1:{regular}", verify=trust, trust_env=False, timeout=30) as client:
            assert client.post(f"https://api.anthropic.com{ANTHROPIC.path}", json=ANTHROPIC.ask("Hi.")).is_success
        with httpx.Client(trust_env=False, timeout=30) as client:
            assert client.post(f"http://127.0.0.1:{reverse}{CHAT.path}", json=body).is_success
        answer = through_socks(socks, "openrouter.ai", trust, json.dumps(body).encode())
        assert answer.startswith(b"HTTP/1.1 200 OK"), answer
        process.terminate()
        process.wait(30)
    return {row["session_id"]: row for row in read_calls(folder / "run").to_pylist()}


@pytest.mark.parametrize(
    ("session", "host"),
    [("regular", "api.anthropic.com"), ("reverse", "api.openai.com"), ("socks", "openrouter.ai")],
)
def test_several_modes_work_at_once(ways: dict[str, dict[str, Any]], session: str, host: str) -> None:
    """The session is told by the mode, the host by the request or, in reverse mode, by the mode."""
    assert (ways[session]["host"], ways[session]["status"]) == (host, "completed")


class OnlyHTTP2(ssl.SSLContext):
    """httpx names HTTP/1.1 first, and mitmproxy takes what a client names first."""

    def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:
        super().set_alpn_protocols(["h2"])


def test_streams_of_one_http2_connection_run_side_by_side(bytes_folder: Path, tmp_path: Path) -> None:
    """All sixteen are at the engine at once; mitmproxy alone would let five through."""

    async def ask(where: dict[str, Any], engine: ScriptedEngine) -> list[httpx.Response]:
        trust = OnlyHTTP2(ssl.PROTOCOL_TLS_CLIENT)
        trust.load_verify_locations(where["ca"])
        proxy = f"http://127.0.0.1:{where['port']}"
        async with httpx.AsyncClient(http2=True, proxy=proxy, verify=trust, trust_env=False, timeout=60) as client:
            url = f"https://api.openai.com{CHAT.path}"
            await client.post(url, json=CHAT.ask("first"))  # so that the others find the connection
            engine.faults += [Fault("hold") for _ in range(16)]
            calls = [asyncio.ensure_future(client.post(url, json=CHAT.ask(f"{n}"))) for n in range(16)]
            await asyncio.to_thread(eventually, lambda: len(engine.calls) == 17, 30)
            while (await asyncio.wait(calls, timeout=0.05))[1]:  # a call may come to stand still after a release
                engine.release()
            return [call.result() for call in calls]

    with (
        ScriptedEngine(bytes_folder, lambda _: "Hello.").serving() as engine,
        mitm("mitmdump", tmp_path, engine, "-p", "0"),
    ):
        where = json.loads((tmp_path / "run" / "proxy.json").read_text())
        answers = asyncio.run(ask(where, engine))
    assert {(answer.status_code, answer.http_version) for answer in answers} == {(200, "HTTP/2")}
    assert (tmp_path / "log").read_text().count("client connect") == 1


# --- people -------------------------------------------------------------------------------------------------------


def test_mitmdump_lists_the_options_with_their_help() -> None:
    """As `mitmdump --options | grep polar_` shows them."""
    command = [str(Path(sys.executable).parent / "mitmdump"), "-s", str(ROOT / "addons" / "polar.py"), "--options"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, _, _, text in OPTIONS:
        assert f"{name}:" in listed
        assert text.split()[0] in listed


def web(port: int, method: str, path: str, **more: Any) -> httpx.Response:
    """A request to mitmweb's own interface."""
    headers = {"authorization": "Bearer for-the-test", "x-xsrftoken": "2aa", "cookie": "_mitmproxy_xsrf=2aa"}
    return httpx.request(method, f"http://127.0.0.1:{port}{path}", headers=headers, trust_env=False, timeout=30, **more)


@dataclass
class Looked:
    """What somebody sees in mitmweb after one streamed and one plain call."""

    flows: list[dict[str, Any]]
    request: str
    """The request in the view of calls."""
    answer: str
    """The streamed answer in it."""
    record: bytes
    """What the flow keeps of the streamed answer."""
    status: str
    """What polar.status says."""
    sealed: bool
    """Whether polar.flush made a table while the proxy ran."""


@pytest.fixture(scope="module")
def looked(bytes_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Looked:
    """One mitmweb, used and looked at."""
    folder = tmp_path_factory.mktemp("mitmweb")
    (port,) = free_ports(1)
    arguments = ("-p", "0", "--no-web-open-browser", "--web-port", str(port))
    with (
        ScriptedEngine(bytes_folder, lambda _: "Hello, you.").serving() as engine,
        mitm("mitmweb", folder, engine, *arguments, web_password="for-the-test"),
    ):
        where = json.loads((folder / "run" / "proxy.json").read_text())
        trust = ssl.create_default_context(cafile=where["ca"])
        with httpx.Client(proxy=f"http://127.0.0.1:{where['port']}", verify=trust, trust_env=False) as client:
            headers = {"authorization": f"Bearer {SECRET}"}
            url = f"https://api.openai.com{CHAT.path}?key={SECRET}"
            assert client.post(url, json=CHAT.ask("Who?", stream=True), headers=headers).is_success
            assert client.post(url, json=CHAT.ask("And who else?"), headers=headers).is_success
        flows = web(port, "GET", "/flows").json()
        at = f"/flows/{flows[0]['id']}"
        views = [web(port, "GET", f"{at}/{side}/content/polar.json").json()["text"] for side in ("request", "response")]
        record = web(port, "GET", f"{at}/response/content.data").content
        status = web(port, "POST", "/commands/polar.status", json={"arguments": []}).json()
        web(port, "POST", "/commands/polar.flush", json={"arguments": []})
        eventually(lambda: [*(folder / "run" / "calls").glob("*.parquet")] != [])
    return Looked(flows, *views, record, status["value"], sealed=True)


def test_mitmweb_shows_the_request_as_the_client_made_it(looked: Looked) -> None:
    """Not where it was sent; without its key and without what the proxy told the gateway."""
    assert [(f["request"]["host"], f["request"]["scheme"], f["request"]["port"]) for f in looked.flows] == [
        ("api.openai.com", "https", 443)
    ] * 2
    assert SECRET not in json.dumps(looked.flows)
    assert "x-polar" not in json.dumps(looked.flows)


def test_mitmweb_shows_a_call_as_a_conversation(looked: Looked) -> None:
    """Roles, text and tools."""
    assert "[user]\nWho?" in looked.request
    assert "[tools] run" in looked.request


def test_mitmweb_shows_the_sampled_tokens_of_an_answer(looked: Looked) -> None:
    """Ids with their logprobs and bytes, from the call's row."""
    assert "Hello, you." in looked.answer
    assert re.search(r"^ +\d+ +-0\.0002  'H'$", looked.answer, re.MULTILINE)


def test_mitmweb_keeps_a_readable_record_of_a_streamed_answer(looked: Looked) -> None:
    """Its plain form: mitmproxy keeps nothing of a stream."""
    assert CHAT.said(json.loads(looked.record))[0] == "Hello, you."


def test_the_status_is_told_from_memory(looked: Looked) -> None:
    """Calls, sessions, tokens, engine and run folder."""
    assert looked.status.startswith("polar: 2 calls, 0 running, 2 completed, 1 sessions, 24 sampled tokens")
    assert "engine http://127.0.0.1" in looked.status


def test_a_flush_seals_the_journal_while_the_proxy_runs(looked: Looked) -> None:
    """The finished calls are a Parquet file."""
    assert looked.sealed
