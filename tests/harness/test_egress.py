"""What goes past the models: answered at once, upgraded never, passed through only where the user says so."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from polar_mitm.journal import read_calls
from polar_toolkit.rollout.harnesses.scripted_engine import STOP, Fault
from tests.bench.interception import Interception, interception

pytestmark = pytest.mark.harness

CHAT = "https://api.openai.com/v1/chat/completions"
HELLO = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Generator[Interception]:
    with interception(tmp_path_factory.mktemp("run"), lambda _: "hello yourself") as made, made.proxy():
        yield made


def test_an_unlisted_request_gets_a_json_404(bench: Interception):
    """Telemetry, settings and whatever else a provider's host is asked for: 404, JSON, and no connection."""
    for url in ("https://api.openai.com/v1/files", "https://chatgpt.com/backend-api/x", "http://example.org/"):
        answer = bench.ask(url, session="s1")
        assert answer.status_code == 404
        assert "is not answered here" in answer.json()["error"]["message"]
    assert bench.namespace.attempts() == []


def test_a_websocket_upgrade_gets_426(bench: Interception):
    """Codex falls back to HTTP at once on a 426, and on nothing else."""
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    assert bench.ask("https://api.openai.com/v1/responses", session="s1", headers=headers).status_code == 426


def test_no_other_machine_is_reached_by_default(bench: Interception):
    """A server on this machine is not passed through either."""
    assert bench.ask(f"{bench.engine.url}/server_info", session="s1").status_code == 404


def test_a_key_is_written_nowhere(bench: Interception):
    """The key that a harness sends stands in no file of the run folder and does not reach the engine."""
    answer = bench.ask(CHAT, session="s1", body=HELLO, headers={"authorization": "Bearer sk-not-for-disk"})
    assert answer.status_code == 200
    written = [path for path in bench.run.rglob("*") if path.is_file()]
    assert any(path.suffix == ".journal" for path in written)
    assert not [path for path in written if b"sk-not-for-disk" in path.read_bytes()]


def test_a_wrong_secret_is_refused_and_recorded(bench: Interception):
    """Where sessions are registered, a stranger gets a 401, the engine nothing, and the record a row."""
    before = len(bench.engine.calls)
    bench.environment("s1")
    answer = bench.ask(CHAT, session="s1", body=HELLO, secret="guessed")
    assert answer.status_code == 401
    assert len(bench.engine.calls) == before
    assert read_calls(bench.run).to_pylist()[-1]["error_kind"] == "unauthorized"


def test_another_program_in_the_session_is_foreign(bench: Interception):
    """What the agent's shell runs inherits the proxy's address: it is answered, recorded, and not trained."""
    for agent in ("harness/1.0", "curl/8.0"):
        assert bench.ask(CHAT, session="s2", body=HELLO, headers={"user-agent": agent}).status_code == 200
    mine, other = read_calls(bench.run).to_pylist()[-2:]
    assert (mine["kind"], mine["trainable"]) == ("agent", True)
    assert (other["kind"], other["trainable"], other["untrainable_reason"]) == ("foreign", False, "foreign")


def test_a_client_that_leaves_ends_the_generation(bench: Interception):
    """A connection that is closed in the middle of a stream takes the engine's call with it; a part is on record."""
    bench.engine.faults.append(Fault("hold", after=1))
    with bench.asking(CHAT, session="s1", body=HELLO):
        assert bench.engine.holding.wait(10)
    call = bench.engine.calls[-1]
    assert call.ended.wait(10)
    assert call.finish is None or call.finish["type"] == "abort"
    assert STOP not in bench.engine.decode(call.output_ids)


class Elsewhere(BaseHTTPRequestHandler):
    """Some server of the world: in the bench's network every address is this machine."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "9")
        self.end_headers()
        self.wfile.write(b"elsewhere")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def elsewhere(bench: Interception) -> Generator[int]:
    """The port at which any address answers."""
    with bench.namespace.entered():
        server = ThreadingHTTPServer(("0.0.0.0", 0), Elsewhere)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_host_that_the_user_names_is_passed_through(tmp_path_factory: pytest.TempPathFactory):
    """The very answer of that server comes back, twice; not of one inside, though it is named."""
    named = "140.82.121.4,127.0.0.1"
    with interception(tmp_path_factory.mktemp("run"), ["x"]) as bench, bench.proxy(polar_allow_hosts=named):
        with elsewhere(bench) as port:
            answers = [bench.ask(f"http://140.82.121.4:{port}/a", session="s1") for _ in range(2)]
            other = bench.ask(f"http://140.82.121.5:{port}/a", session="s1")
        inside = bench.ask(f"{bench.engine.url}/server_info", session="s1")
    assert [(answer.status_code, answer.content) for answer in answers] == [(200, b"elsewhere")] * 2
    assert other.status_code == 404
    assert inside.status_code == 502
    assert "127.0.0.1" in inside.json()["error"]["message"]
