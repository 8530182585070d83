"""What comes in wrong: each mistake gets its protocol's own answer, and one row that says what happened."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar_mitm.engine import PROBE
from polar_mitm.gateway import find_dialect, main, not_found
from polar_mitm.identity import register
from polar_mitm.journal import read_calls
from polar_mitm.tokens import Template
from tests.bench.scripted_engine import ScriptedEngine
from tests.mitm.canned import answering
from tests.mitm.house import House, open_house
from tests.mitm.protocols import ANTHROPIC, CHAT, PROTOCOLS, RESPONSES, Protocol

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
IMAGES: dict[str, Json] = {
    "openai_chat": {"type": "image_url", "image_url": {"url": "data:"}},
    "openai_responses": {"type": "input_image", "image_url": "data:"},
    "anthropic": {"type": "image", "source": {"type": "base64", "data": ""}},
}
by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.name)


@pytest.fixture(scope="module")
def shared(
    qwen3: Template, qwen3_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[tuple[House, set[str]]]:
    """A gateway before an engine that says hello, and the ids of the calls that earlier tests made."""
    with (
        ScriptedEngine(qwen3_folder, lambda _: "Hello.").serving() as engine,
        open_house(tmp_path_factory.mktemp("run"), engine.url, qwen3, described=True) as opened,
    ):
        yield opened, set()


@pytest.fixture
def house(shared: tuple[House, set[str]]) -> Iterator[House]:
    """The gateway, for requests that leave no trace but their own row."""
    house, known = shared
    house.hidden = known
    yield house
    known.update(row["call_id"] for row in house.calls())


@pytest.fixture
def own_house(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> Generator[House]:
    """A gateway of a test's own, for what changes the run."""
    with (
        ScriptedEngine(qwen3_folder, lambda _: "Hello.").serving() as engine,
        open_house(tmp_path, engine.url, qwen3, described=True) as opened,
    ):
        yield opened


@contextmanager
def before(engine: str, run: Path, template: Template, **options: Any) -> Generator[House]:
    with open_house(run, engine, template, **options) as opened:
        yield opened


def told(protocol: Protocol, answer: httpx.Response) -> str:
    """The error message of an answer in the protocol's own shape."""
    body = answer.json()
    if protocol is ANTHROPIC:
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]["message"]


def only_row(house: House) -> Json:
    (row,) = house.calls()
    return row


# --- requests that are wrong --------------------------------------------------------------------------------------


@by_protocol
@pytest.mark.parametrize("body", [b'{"model": ', b"[1, 2]", b"\xff\xfe"], ids=["malformed", "no object", "no text"])
def test_a_body_that_is_no_json_object_is_a_400(house: House, protocol: Protocol, body: bytes) -> None:
    """The harness is told, and the row keeps the body."""
    answer = house.client.post(protocol.path, content=body)
    assert answer.status_code == 400
    assert "JSON" in told(protocol, answer)
    row = only_row(house)
    assert (row["status"], row["error_kind"], row["dialect"]) == ("refused", "bad_request", protocol.name)
    assert json.loads(row["request"]) == body.decode("utf-8", "replace")
    assert not row["trainable"]


@by_protocol
def test_an_image_is_a_400_that_names_the_field(house: House, protocol: Protocol) -> None:
    """What would change the meaning and is not supported is refused."""
    key = "input" if protocol is RESPONSES else "messages"
    body = protocol.ask("Look.") | {key: [{"role": "user", "content": [IMAGES[protocol.name]]}]}
    answer = house.post(protocol.path, body)
    assert answer.status_code == 400
    assert f"{key}[0].content[0].type" in told(protocol, answer)
    assert f"{key}[0].content[0].type" in only_row(house)["error"]


@pytest.mark.parametrize(
    ("protocol", "field", "value"),
    [
        (CHAT, "n", 2),
        (CHAT, "stop", ["x"]),
        (RESPONSES, "previous_response_id", "resp_1"),
        (ANTHROPIC, "stop_sequences", ["x"]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_unsupported_field_is_a_400_that_names_it(
    house: House, protocol: Protocol, field: str, value: object
) -> None:
    """The message says which field of the request."""
    answer = house.post(protocol.path, protocol.ask("Look.", **{field: value}))
    assert answer.status_code == 400
    assert told(protocol, answer).startswith(f"{field}:")
    assert only_row(house)["error"].startswith(f"{field}:")


@by_protocol
def test_an_unknown_field_is_answered_and_named(house: House, protocol: Protocol) -> None:
    """Harmless: ignored, and listed in the row's fidelity."""
    answer = house.post(protocol.path, protocol.ask("Hi.", brand_new_field={"a": 1}))
    assert protocol.said(answer.json())[0] == "Hello."
    row = only_row(house)
    assert row["status"] == "completed"
    assert "brand_new_field" in row["fidelity"]


@by_protocol
def test_a_wrong_key_is_a_401(own_house: House, protocol: Protocol) -> None:
    """In a run with registered sessions the key is NAME:SECRET; anything else is refused and counted."""
    register(own_house.run, "alice", "g")
    answer = own_house.post(protocol.path, protocol.ask("Hi."), x_api_key="alice:wrong")
    assert answer.status_code == 401
    assert "alice" in told(protocol, answer)
    row = only_row(own_house)
    assert (row["status"], row["error_kind"], row["session_id"]) == ("refused", "unauthorized", "alice")


@pytest.mark.parametrize(("header", "value"), [("x_api_key", "alice:{}"), ("authorization", "Bearer alice:{}")])
def test_a_sessions_key_is_taken_from_either_header(own_house: House, header: str, value: str) -> None:
    """OpenAI's and Anthropic's clients send it differently."""
    secret = register(own_house.run, "alice", "g")
    assert own_house.post(CHAT.path, CHAT.ask("Hi."), **{header: value.format(secret)}).status_code == 200
    row = only_row(own_house)
    assert (row["session_id"], row["group_id"]) == ("alice", "g")
    assert secret not in json.dumps(row, default=str)


@by_protocol
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_an_engine_that_cannot_be_reached_is_the_providers_error(
    qwen3: Template, tmp_path: Path, protocol: Protocol, *, stream: bool
) -> None:
    """After `polar_wait` seconds: the dialect's status, or the stream's terminal error."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        engine = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with before(engine, tmp_path, qwen3, wait=0.3) as house:
        answer = house.post(protocol.path, protocol.ask("Hi.", stream=stream))
    if stream:
        assert protocol.failed in answer.content
        assert protocol.done not in answer.content
    else:
        assert answer.status_code == (529 if protocol is ANTHROPIC else 503)
        assert engine in told(protocol, answer)
    row = only_row(house)
    assert (row["status"], row["error_kind"]) == ("failed", "engine_unavailable")
    assert engine in row["error"]
    assert row["prompt_len"] > 0


@by_protocol
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_tokenizer_that_is_not_the_engines_is_the_providers_500(
    qwen3: Template, tmp_path: Path, protocol: Protocol, *, stream: bool
) -> None:
    """The run is misconfigured: no call is answered from wrong ids."""
    engine = json.dumps({"model_path": "m", "data": [{"max_model_len": 1000}], "tokens": [1, 2, 3]})
    with answering(200, engine) as url, before(url, tmp_path, qwen3) as house:
        answer = house.post(protocol.path, protocol.ask("Hi.", stream=stream))
    if stream:
        assert protocol.failed in answer.content
        assert protocol.done not in answer.content
    else:
        assert answer.status_code == 500
        assert "polar_tokenizer" in told(protocol, answer)
    row = only_row(house)
    assert (row["status"], row["error_kind"]) == ("failed", "tokenizer_mismatch")
    assert "polar_tokenizer" in row["error"]


@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        (CHAT, "maximum context length is"),
        (RESPONSES, "maximum context length is"),
        (ANTHROPIC, "prompt is too long: "),
    ],
    ids=lambda v: v.name if isinstance(v, Protocol) else "",
)
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_prompt_over_the_context_is_a_400_in_the_providers_words(
    qwen3: Template, tmp_path: Path, protocol: Protocol, words: str, *, stream: bool
) -> None:
    """Also for a stream, because harnesses compact on a 400 with these words. The engine is not asked."""
    engine = {"model_path": "m", "data": [{"max_model_len": 50}], "tokens": qwen3.encode(PROBE)}
    with answering(200, json.dumps(engine)) as url, before(url, tmp_path, qwen3, described=True) as house:
        answer = house.post(protocol.path, protocol.ask("word " * 50, stream=stream))
    assert answer.status_code == 400
    assert words in told(protocol, answer)
    if protocol is not ANTHROPIC:
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    row = only_row(house)
    assert (row["status"], row["error_kind"]) == ("refused", "context_overflow")


# --- what is not a model call -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"), ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/embeddings"),
        ("GET", "/v1/responses"), ("HEAD", "/"),
    ],
)  # fmt: skip
def test_what_is_no_model_call_is_a_404_without_a_row(house: House, method: str, path: str) -> None:
    """The fastest answer for every harness; the run folder holds calls only."""
    answer = house.client.request(method, path)
    assert answer.status_code == 404
    assert method == "HEAD" or answer.json()["error"]["type"] == "not_found_error"
    assert house.calls() == []


def test_a_websocket_is_told_to_post(house: House) -> None:
    """Codex asks for one first and then falls back."""
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x", "sec-websocket-version": "13"}
    answer = house.client.get("/v1/responses", headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (426, "upgrade_required")


def test_the_dialect_is_told_by_method_and_path() -> None:
    """On whatever base path."""
    found = {p.name: find_dialect("POST", f"/some/base{p.path}") for p in PROTOCOLS}
    assert {name: dialect and dialect.name for name, dialect in found.items()} == {p.name: p.name for p in PROTOCOLS}
    assert find_dialect("GET", CHAT.path) is None
    assert "GET /x" in not_found("GET", "/x")["error"]["message"]


# --- bodies and headers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_compressed_body_is_read(house: House, encoding: str, pack: Any) -> None:
    """As clients with a base URL of the gateway may send it."""
    content = pack(json.dumps(CHAT.ask("Hi.")).encode())
    answer = house.client.post(CHAT.path, content=content, headers={"content-encoding": encoding})
    assert CHAT.said(answer.json())[0] == "Hello."
    assert json.loads(only_row(house)["request"])["model"] == "some-model"


@pytest.mark.parametrize(("encoding", "named"), [("gzip", "not gzip"), ("br", "'br'")])
def test_a_body_that_cannot_be_unpacked_is_a_400(house: House, encoding: str, named: str) -> None:
    """Broken, or in an encoding that is not read here."""
    answer = house.client.post(CHAT.path, content=b"garbage", headers={"content-encoding": encoding})
    assert answer.status_code == 400
    assert named in told(CHAT, answer)
    assert only_row(house)["status"] == "refused"


def test_no_credential_reaches_the_run_folder(house: House) -> None:
    """Key, token, cookie and query: not one of them is in any file."""
    secret = "sk-very-secret"
    headers = {"authorization": f"Bearer {secret}", "x_api_key": secret, "x_goog_api_key": secret, "cookie": secret}
    assert house.post(f"{CHAT.path}?key={secret}", CHAT.ask("Hi."), **headers).status_code == 200
    row = only_row(house)
    assert row["path"] == CHAT.path
    assert secret not in json.dumps(row, default=str)


def test_the_proxys_headers_are_believed_beside_its_secret_only(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """Session and host come from the addon; a client that writes the same headers is nobody."""
    claims = {"x_polar_user": "alice", "x_polar_password": "x", "x_polar_host": "api.example.org"}
    with (
        ScriptedEngine(qwen3_folder, lambda _: "Hello.").serving() as engine,
        before(engine.url, tmp_path, qwen3, secret="between-us") as house,
    ):
        house.post(CHAT.path, CHAT.ask("Hi."), x_polar_gateway="between-us", **claims)
        house.post(CHAT.path, CHAT.ask("Hi."), x_polar_gateway="guess", **claims)
    believed, not_believed = house.calls()
    assert (believed["session_id"], believed["host"]) == ("alice", "api.example.org")
    assert (not_believed["session_id"], not_believed["host"]) == ("default", f"127.0.0.1:{house.port}")


# --- the program --------------------------------------------------------------------------------------------------


def test_the_gateway_runs_by_itself(bytes_folder: Path, tmp_path: Path) -> None:
    """`python -m polar_mitm.gateway` says where it listens, answers, and seals its journal on SIGTERM."""
    run = tmp_path / "run"
    with ScriptedEngine(bytes_folder, lambda _: "Hello.").serving() as engine:
        command = [sys.executable, "-m", "polar_mitm.gateway", "--engine", engine.url, "--run", str(run), "--port", "0"]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            line = process.stdout.readline()
            url = json.loads((run / "proxy.json").read_text())["gateway"]
            assert url in line
            answer = httpx.post(f"{url}{CHAT.path}", json=CHAT.ask("Hi."), trust_env=False, timeout=30)
            os.kill(process.pid, signal.SIGTERM)
            process.wait(30)
    assert CHAT.said(answer.json())[0] == "Hello."
    assert list((run / "journal").iterdir()) == []
    (row,) = read_calls(run).to_pylist()
    assert (row["status"], row["client_delivered"]) == ("completed", True)


def test_a_wrong_option_ends_the_program_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback."""
    monkeypatch.setattr(sys, "argv", ["gateway", "--engine", "localhost:30000", "--run", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^polar: polar_engine is 'localhost:30000'.*$"):
        main()
