"""The face to mitmproxy: options, hooks one by one, and one real mitmdump whose evidence many tests read."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import re
import signal
import ssl
import subprocess
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from mitmproxy import connection, exceptions, http
from mitmproxy.proxy.server_hooks import ServerConnectionHookData

from polar_mitm.addon import Polar
from polar_mitm.identity import register
from polar_mitm.journal import read_calls
from tests.bench.scripted_engine import Fault, ScriptedEngine
from tests.mitm.house import eventually
from tests.mitm.protocols import CHAT, RESPONSES

with warnings.catch_warnings():  # mitmproxy 12.2.3 uses names that pyparsing deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from mitmproxy.addons import dumper, proxyserver
    from mitmproxy.test import taddons, tflow

ROOT = Path(__file__).parents[2]
ENGINE = "http://127.0.0.1:30000"


@contextmanager
def addon(**options: str) -> Generator[Polar]:
    """The addon with these options, its gateway said to be at 127.0.0.1:4444."""
    polar = Polar()
    with taddons.context(dumper.Dumper(), proxyserver.Proxyserver(), polar) as tctx:
        tctx.configure(polar, **({"polar_engine": ENGINE} | options))
        polar._gateway = ("127.0.0.1", 4444)  # pyright: ignore[reportPrivateUsage] - running() would open a run
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


def test_what_is_no_model_call_is_answered_at_once() -> None:
    """A 404 in JSON: the fastest answer for every harness."""
    flow = tflow.tflow(req=http.Request.make("GET", "https://api.openai.com/v1/models"))
    with addon() as polar:
        response = sent(polar, flow).response
    assert response
    assert (response.status_code, response.headers["content-type"]) == (404, "application/json")
    assert json.loads(response.content or b"")["error"]["type"] == "not_found_error"


def test_a_websocket_is_refused_with_an_upgrade_error() -> None:
    """Codex then posts."""
    request = http.Request.make("GET", "https://api.openai.com/v1/responses", b"", {"Upgrade": "WebSocket"})
    with addon() as polar:
        response = sent(polar, tflow.tflow(req=request)).response
    assert response
    assert response.status_code == 426


def test_an_allowed_host_is_passed_through_untouched() -> None:
    """Its own credentials are its own business; ours are taken off."""
    headers = http.Headers(authorization="token x", proxy_authorization=basic("bob:x"))
    request = http.Request.make("POST", "https://GitHub.com/v1/chat/completions", b"{}", headers)
    with addon(polar_allow_hosts="github.com") as polar:
        flow = sent(polar, tflow.tflow(req=request))
    assert flow.response is None
    assert flow.request.headers.get("authorization") == "token x"
    assert "proxy-authorization" not in flow.request.headers
    assert "x-polar-gateway" not in flow.request.headers


@pytest.mark.parametrize(
    ("address", "goes"),
    [
        (("127.0.0.1", 4444), True), (("github.com", 443), True), (("GitHub.com", 22), True),
        (("api.openai.com", 443), False), (("127.0.0.1", 30000), False), (("evil.github.com", 443), False),
        (("::1", 4444, 0, 0), False), (None, False),
    ],
)  # fmt: skip
def test_a_connection_leaves_for_the_gateway_and_for_allowed_hosts_only(
    address: tuple[str, int] | None, *, goes: bool
) -> None:
    """The guard stands at the last place before the socket."""
    with addon(polar_allow_hosts="github.com") as polar:
        data = ServerConnectionHookData(server=connection.Server(address=address), client=tflow.tclient_conn())
        polar.server_connect(data)
    assert (data.server.error is None) is goes


def test_without_options_no_connection_leaves() -> None:
    """Also before the addon was configured."""
    polar = Polar()
    data = ServerConnectionHookData(
        server=connection.Server(address=("api.openai.com", 443)), client=tflow.tclient_conn()
    )
    polar.server_connect(data)
    assert data.server.error


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
        settings = {
            "polar_engine": engine.url, "polar_run": run, "confdir": folder / "confdir",
            "polar_allow_hosts": "allowed.invalid",
        }  # fmt: skip
        command = [str(Path(sys.executable).parent / "mitmdump"), "-s", str(ROOT / "addons" / "polar.py"), "-p", "0"]
        command += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                found = Evidence(run, process.pid, secret)
                eventually(lambda: (run / "proxy.json").exists() or process.poll() is not None, 60)
                assert process.poll() is None, (folder / "log").read_text()
                _use(found, engine, process)
            finally:
                process.kill()
    return found


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
        found.answers["other"] = client.get("https://api.openai.com/v1/models")
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
