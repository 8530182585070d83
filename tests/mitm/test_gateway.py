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

import brotli
import httpx
import pytest
import zstandard

from polar_mitm.compression import LARGEST_BODY
from polar_mitm.engine import PROBE
from polar_mitm.gateway import FIGURES, main
from polar_mitm.identity import figures_token, load_key, register, seal
from polar_mitm.journal import read_calls
from polar_mitm.tokens import Template
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from tests.mitm.canned import answering
from tests.mitm.house import Caller, House, eventually, open_house
from tests.mitm.protocols import ANTHROPIC, CHAT, EVERY, GEMINI, RESPONSES, Protocol

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]
IMAGES: dict[str, Json] = {
    "openai_chat": {"type": "image_url", "image_url": {"url": "data:"}},
    "openai_responses": {"type": "input_image", "image_url": "data:"},
    "anthropic": {"type": "image", "source": {"type": "base64", "data": ""}},
    "gemini": {"inlineData": {"mimeType": "image/png", "data": ""}},
}
by_protocol = pytest.mark.parametrize("protocol", EVERY, ids=lambda p: p.name)


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
    elif protocol is GEMINI:
        assert body["error"].keys() >= {"code", "message", "status"}
        assert body["error"]["code"] == answer.status_code
    else:
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]["message"]


def asking(protocol: Protocol, text: str, *, stream: bool) -> Json:
    """A first request; Gemini's says in its path whether it is streamed."""
    return protocol.ask(text) if protocol is GEMINI else protocol.ask(text, stream=stream)


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
def test_an_image_is_a_400(house: House, protocol: Protocol) -> None:
    """What would change the meaning and is not supported is refused, in the provider's own words."""
    key = {"openai_responses": "input", "gemini": "contents"}.get(protocol.name, "messages")
    content = "parts" if protocol is GEMINI else "content"
    body = protocol.ask("Look.") | {key: [{"role": "user", content: [IMAGES[protocol.name]]}]}
    answer = house.post(protocol.path, body)
    assert answer.status_code == 400
    assert "text" in told(protocol, answer)
    assert only_row(house)["error_kind"] == "bad_request"


@pytest.mark.parametrize(
    ("protocol", "field", "value"),
    [(CHAT, "top_logprobs", 2), (RESPONSES, "n", 2), (ANTHROPIC, "n", 2), (GEMINI, "cachedContent", "x")],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_unsupported_field_is_a_400_that_names_it(
    house: House, protocol: Protocol, field: str, value: object
) -> None:
    """The message says which field of the request."""
    answer = house.post(protocol.path, protocol.ask("Look.", **{field: value}))
    assert answer.status_code == 400
    assert field in told(protocol, answer)
    assert field in only_row(house)["error"]


@by_protocol
def test_an_unknown_field_is_answered_and_named(house: House, protocol: Protocol) -> None:
    """Harmless: ignored, and listed in the row's fidelity."""
    answer = house.post(protocol.path, protocol.ask("Hi.", brandNewField={"a": 1}))
    assert protocol.said(answer.json())[0] == "Hello."
    row = only_row(house)
    assert row["status"] == "completed"
    assert "brandNewField" in row["fidelity"]


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
        answer = house.post(protocol.at(stream=stream), asking(protocol, "Hi.", stream=stream))
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
        answer = house.post(protocol.at(stream=stream), asking(protocol, "Hi.", stream=stream))
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
        (GEMINI, "exceeds the maximum number of tokens"),
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
        answer = house.post(protocol.at(stream=stream), asking(protocol, "word " * 50, stream=stream))
    assert answer.status_code == 400
    assert words in told(protocol, answer)
    if protocol in (CHAT, RESPONSES):
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    row = only_row(house)
    assert (row["status"], row["error_kind"]) == ("refused", "context_overflow")


# --- side routes --------------------------------------------------------------------------------------------------

COUNTS = {
    "openai_responses": ("/v1/responses/input_tokens", "input_tokens"),
    "anthropic": ("/v1/messages/count_tokens", "input_tokens"),
    "gemini": ("/v1beta/models/some-model:countTokens", "totalTokens"),
}


@pytest.mark.parametrize("protocol", [RESPONSES, ANTHROPIC, GEMINI], ids=lambda p: p.name)
def test_a_count_is_that_of_the_call_that_follows(house: House, protocol: Protocol) -> None:
    """Exact, tools and all; it leaves no row."""
    path, field = COUNTS[protocol.name]
    counted = house.post(path, protocol.ask("How many are we?")).json()[field]
    assert house.calls() == []
    house.post(protocol.path, protocol.ask("How many are we?"))
    assert only_row(house)["prompt_len"] == counted > 100


@pytest.mark.parametrize("protocol", [RESPONSES, ANTHROPIC, GEMINI], ids=lambda p: p.name)
def test_a_count_of_what_cannot_be_read_is_a_400(house: House, protocol: Protocol) -> None:
    """In the protocol's shape, and without a row."""
    answer = house.client.post(COUNTS[protocol.name][0], content=b"{")
    assert answer.status_code == 400
    assert "JSON" in told(protocol, answer)
    assert house.calls() == []


@pytest.mark.parametrize(
    ("path", "headers", "names"),
    [
        ("/v1/models", {}, lambda body: [m["id"] for m in body["data"]]),
        ("/v1/models", {"anthropic_version": "2023-06-01"}, lambda body: [m["id"] for m in body["data"]]),
        ("/v1beta/models", {}, lambda body: [m["name"].removeprefix("models/") for m in body["models"]]),
    ],
    ids=["OpenAI", "Anthropic", "Gemini"],
)
def test_the_list_of_models_is_the_engines_model(
    house: House, qwen3_folder: Path, path: str, headers: dict[str, str], names: Any
) -> None:
    """By its name; where it lies on the engine's disk is nobody's business."""
    answer = house.client.get(path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    assert names(answer.json()) == [qwen3_folder.name]
    assert str(qwen3_folder) not in answer.text


@pytest.mark.parametrize(
    ("path", "field", "name"),
    [("/v1/models/gpt-5.2", "id", "gpt-5.2"), ("/v1beta/models/gemini-x", "name", "models/gemini-x")],
)
def test_every_model_is_there(house: House, path: str, field: str, name: str) -> None:
    """Under the name by which the harness knows it."""
    assert house.client.get(path).json()[field] == name


def test_models_are_not_waited_for(qwen3: Template, tmp_path: Path) -> None:
    """An engine that cannot be reached is an error of the provider's, soon."""
    with before("http://127.0.0.1:9", tmp_path, qwen3, wait=0.1) as house:
        answer = house.client.get("/v1/models")
    assert answer.status_code == 503
    assert told(CHAT, answer)


def test_an_earlier_answer_is_given_again_until_it_is_deleted(own_house: House) -> None:
    """From the run's own record; the row stays."""
    answer = own_house.post(RESPONSES.path, RESPONSES.ask("Hi.")).json()
    path = f"/v1/responses/{answer['id']}"
    assert own_house.client.get(path).json() == answer
    assert own_house.client.delete(path).json()["deleted"] is True
    gone = own_house.client.get(path)
    assert gone.status_code == 404
    assert answer["id"] in told(RESPONSES, gone)
    assert only_row(own_house)["status"] == "completed"


def test_an_answer_of_another_session_is_not_given(own_house: House) -> None:
    """And without credentials nothing is."""
    alice, bob = (f"{name}:{register(own_house.run, name)}" for name in ("alice", "bob"))
    answer = own_house.post(RESPONSES.path, RESPONSES.ask("Hi."), x_api_key=alice).json()
    path = f"/v1/responses/{answer['id']}"
    asked = [own_house.client.get(path, headers={"x-api-key": key}).status_code for key in (alice, bob, "x")]
    assert asked == [200, 404, 401]


@pytest.mark.parametrize(
    ("protocol", "method", "path", "headers"),
    [
        (CHAT, "POST", "/v1/embeddings", {}),
        (CHAT, "GET", "/v1/responses", {}),
        (CHAT, "HEAD", "/", {}),
        (ANTHROPIC, "GET", "/api/claude_code/settings", {"anthropic-version": "2023-06-01"}),
        (GEMINI, "POST", "/v1beta/models/m:embedContent", {"x-goog-api-key": "x"}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_is_not_answered_is_a_404_without_a_row(
    house: House, protocol: Protocol, method: str, path: str, headers: dict[str, str]
) -> None:
    """The fastest answer for every harness; the run folder holds calls only."""
    answer = house.client.request(method, path, headers=headers)
    assert answer.status_code == 404
    assert method == "HEAD" or f"{method} {path}" in told(protocol, answer)
    assert house.calls() == []


def test_a_websocket_is_told_to_post(house: House) -> None:
    """Codex asks for one first and then falls back."""
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x", "sec-websocket-version": "13"}
    answer = house.client.get("/v1/responses", headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (426, "upgrade_required")


# --- faults and time ----------------------------------------------------------------------------------------------


class Faulty:
    """A template that breaks at one place, as no library promises not to."""

    def __init__(self, template: Template, place: str) -> None:
        self._template, self._place = template, place

    def __getattr__(self, name: str) -> Any:
        return self._break if name == self._place else getattr(self._template, name)

    def _break(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("the library broke")


@by_protocol
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("place", ["render", "parse"])
def test_a_fault_that_nobody_foresaw_is_told_in_the_protocols_shape(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol, place: str, *, stream: bool
) -> None:
    """A 500, or the stream's terminal error: never a silent cut."""
    template: Any = Faulty(qwen3, place)
    with (
        ScriptedEngine(qwen3_folder, lambda _: "Hello.").serving() as engine,
        before(engine.url, tmp_path, template) as house,
    ):
        answer = house.post(protocol.at(stream=stream), asking(protocol, "Hi.", stream=stream))
    if stream and place == "parse":
        assert protocol.failed in answer.content
        assert protocol.done not in answer.content
    else:
        assert answer.status_code == 500
        assert "log" in told(protocol, answer)
    assert b"library" not in answer.content
    assert [row["status"] for row in read_calls(tmp_path).to_pylist()] != ["completed"]


@by_protocol
def test_headers_come_at_once_while_the_engine_is_down(qwen3: Template, tmp_path: Path, protocol: Protocol) -> None:
    """Gemini CLI 0.61.0 gives up after a minute without them; its protocol has no pings, the other three have."""
    with before("http://127.0.0.1:9", tmp_path, qwen3, wait=30.0) as house:
        caller = Caller(house, protocol.at(stream=True), asking(protocol, "Hi.", stream=True))
        assert caller.got(b"\r\n\r\n", 2)
        caller.leave()
    assert b"200 OK" in caller.received
    assert b"content-type: text/event-stream" in caller.received


@by_protocol
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_client_that_leaves_while_the_engine_is_down_ends_its_call(
    qwen3: Template, tmp_path: Path, protocol: Protocol, *, stream: bool
) -> None:
    """Within half a second."""
    with before("http://127.0.0.1:9", tmp_path, qwen3, wait=30.0) as house:
        caller = Caller(house, protocol.at(stream=stream), asking(protocol, "Hi.", stream=stream))
        eventually(lambda: house.desk.ordinals == {"default": 0})
        caller.leave()
        eventually(lambda: [row["status"] for row in house.calls()] == ["aborted"], 0.5)


# --- bodies and headers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("br", brotli.compress), ("zstd", zstandard.compress)],
)
def test_a_compressed_body_is_read(house: House, encoding: str, pack: Any) -> None:
    """Claude Code was seen to send gzip, Codex zstd."""
    content = pack(json.dumps(CHAT.ask("Hi.")).encode())
    answer = house.client.post(CHAT.path, content=content, headers={"content-encoding": encoding})
    assert CHAT.said(answer.json())[0] == "Hello."
    assert json.loads(only_row(house)["request"])["model"] == "some-model"


@pytest.mark.parametrize(("encoding", "named"), [("gzip", "not gzip"), ("br", "not br"), ("lzma", "'lzma'")])
def test_a_body_that_cannot_be_unpacked_is_a_400(house: House, encoding: str, named: str) -> None:
    """Broken, or in an encoding that is not read here."""
    answer = house.client.post(CHAT.path, content=b"garbage", headers={"content-encoding": encoding})
    assert answer.status_code == 400
    assert named in told(CHAT, answer)
    assert only_row(house)["status"] == "refused"


@by_protocol
def test_a_bomb_is_a_413(house: House, protocol: Protocol) -> None:
    """Found before it goes off, and recorded as it came."""
    bomb = zstandard.compress(bytes(LARGEST_BODY + 1))
    answer = house.client.post(protocol.path, content=bomb, headers={"content-encoding": "zstd"})
    assert answer.status_code == 413
    assert str(LARGEST_BODY) in told(protocol, answer)
    assert (only_row(house)["status"], only_row(house)["error_kind"]) == ("refused", "too_large")


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


def placed(run: Path, template: Template, engine: str, **claims: str) -> Json:
    """The row of a call that came through the proxy with these claims."""
    with before(engine, run, template, secret="between-us") as house:
        house.post(CHAT.path, CHAT.ask("Hi."), x_polar_gateway="between-us", **claims)
        return only_row(house)


@pytest.mark.parametrize(
    ("claims", "session"),
    [
        ({"x_polar_mode": "regular@8081"}, "by-mode"),
        ({"x_polar_mode": "regular@8082", "x_polar_address": "10.0.0.7"}, "by-address"),
        ({"x_polar_key": "by-key:{}"}, "by-key"),
        ({"x_polar_user": "by-key", "x_polar_password": "{}", "x_polar_mode": "regular@8081"}, "by-key"),
        ({"x_polar_key": "sk-nobody:mine-alone"}, "unknown"),
        ({"x_polar_mode": "regular@8083"}, "unknown"),
        ({"x_polar_user": "by-mode", "x_polar_mode": "regular@8081"}, "by-mode"),
    ],
    ids=["mode", "address", "key", "user before mode", "another key", "another mode", "user without a secret"],
)
def test_a_session_is_known_by_user_key_mode_or_address(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, claims: dict[str, str], session: str
) -> None:
    """In this order; whoever names itself must know the secret."""
    register(tmp_path, "by-mode", mode="regular@8081")
    register(tmp_path, "by-address", address="10.0.0.7")
    secret = register(tmp_path, "by-key")
    with ScriptedEngine(qwen3_folder, lambda _: "Hello.").serving() as engine:
        row = placed(tmp_path, qwen3, engine.url, **{name: value.format(secret) for name, value in claims.items()})
    refused = session == "unknown" or ("x_polar_user" in claims and "x_polar_password" not in claims)
    assert (row["session_id"], row["status"]) == (session, "refused" if refused else "completed")
    assert "mine-alone" not in json.dumps(row, default=str)


def test_a_users_own_key_with_a_colon_is_no_session(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Behind the proxy it is a real key, and is written nowhere."""
    with ScriptedEngine(qwen3_folder, lambda _: "Hello.").serving() as engine:
        row = placed(tmp_path, qwen3, engine.url, x_polar_key="sk-secret:x")
    assert row["session_id"] == "default"
    assert "sk-secret" not in json.dumps(row, default=str)


# --- budgets ------------------------------------------------------------------------------------------------------


@by_protocol
def test_a_session_that_has_used_its_turns_is_refused_in_the_providers_words(
    own_house: House, protocol: Protocol
) -> None:
    """No sample, and a row that says whose words these were."""
    key = f"alice:{register(own_house.run, 'alice', turns=1)}"
    first, second = (own_house.post(protocol.path, protocol.ask(word), x_api_key=key) for word in ("One.", "Two."))
    assert (first.status_code, second.status_code) == (200, 429 if protocol is GEMINI else 400)
    assert "turns" not in told(protocol, second)
    row = own_house.calls()[-1]
    assert (row["status"], row["error_kind"]) == ("refused", "budget_used")
    assert row["error"] == "session 'alice' has used its 1 turns"


def test_the_last_reply_is_cut_to_what_is_left(own_house: House) -> None:
    """With the provider's own ending; the next call is refused."""
    key = f"alice:{register(own_house.run, 'alice', tokens=2)}"
    first, second = (own_house.post(CHAT.path, CHAT.ask(word), x_api_key=key) for word in ("One.", "Two."))
    assert first.json()["choices"][0]["finish_reason"] == "length"
    assert len(own_house.calls()[0]["output_ids"]) == 2
    assert second.status_code == 400


def test_what_is_left_is_shared_by_the_choices(own_house: House) -> None:
    """Two choices of a session with four tokens have two each."""
    key = f"alice:{register(own_house.run, 'alice', tokens=4)}"
    own_house.post(CHAT.path, CHAT.ask("Hi.", n=2), x_api_key=key)
    assert [len(row["output_ids"]) for row in own_house.calls()] == [2, 2]


def test_a_repeat_of_an_answered_call_costs_no_turn(own_house: House) -> None:
    """It is given the sample that it declares to have asked for."""
    key = f"alice:{register(own_house.run, 'alice', turns=1)}"
    first = own_house.post(CHAT.path, CHAT.ask("Hi."), x_api_key=key)
    again = own_house.post(CHAT.path, CHAT.ask("Hi."), x_api_key=key, x_stainless_retry_count="1")
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


def test_a_foreign_program_uses_the_sessions_turns(own_house: House) -> None:
    """The agent's shell mints no calls beside its budget."""
    key = f"alice:{register(own_house.run, 'alice', turns=2)}"
    own_house.post(CHAT.path, CHAT.ask("Hi."), x_api_key=key, user_agent="pi/1")
    statuses = [own_house.post(CHAT.path, CHAT.ask(w), x_api_key=key, user_agent="curl/8").status_code for w in "ab"]
    assert statuses == [200, 400]
    assert [row["kind"] for row in own_house.calls()] == ["agent", "foreign", "foreign"]


@by_protocol
def test_a_late_call_of_a_sealed_session_is_a_straggler(own_house: House, protocol: Protocol) -> None:
    """Refused in the provider's shape; its row has the session's group and says why."""
    key = f"alice:{register(own_house.run, 'alice', 'g')}"
    seal(own_house.run, "alice")
    answer = own_house.post(protocol.path, protocol.ask("Hi."), x_api_key=key)
    assert answer.status_code == 403
    assert "over" in told(protocol, answer)
    row = only_row(own_house)
    assert (row["status"], row["error_kind"], row["session_id"], row["group_id"]) == ("refused", "sealed", "alice", "g")


# --- figures ------------------------------------------------------------------------------------------------------


def figures(house: House, sessions: str = "", **headers: str) -> httpx.Response:
    token = figures_token(load_key(house.run))
    given = {"authorization": f"Bearer {token}"} | {k.replace("_", "-"): v for k, v in headers.items()}
    return house.client.get(FIGURES, params={"sessions": sessions}, headers=given)


def test_a_runner_sees_what_was_used(own_house: House) -> None:
    """Of the run and of the sessions that it names."""
    key = f"alice:{register(own_house.run, 'alice')}"
    own_house.post(CHAT.path, CHAT.ask("Hi."), x_api_key=key)
    own_house.post(CHAT.path, CHAT.ask("Hi."), x_api_key="alice:wrong")
    sampled = len(own_house.calls()[0]["output_ids"])
    assert figures(own_house, "alice,bob").json() == {
        "calls": 1, "running": 0, "waiting": 0, "sampled": sampled,
        "sessions": {
            "alice": {"calls": 1, "running": 0, "sampled": sampled, "refused": 1, "turns": 1},
            "bob": {"calls": 0, "running": 0, "sampled": 0, "refused": 0, "turns": 0},
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    "headers", [{"authorization": ""}, {"authorization": "Bearer x"}, {"x_polar_gateway": ""}],
    ids=["no token", "a wrong token", "through the proxy"],
)  # fmt: skip
def test_nobody_else_sees_figures(house: House, headers: dict[str, str]) -> None:
    """It is a 404 like any other path."""
    assert figures(house, **headers).status_code == 404


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
