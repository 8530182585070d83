"""The table of routes: who is answered how, on which host and path, and what of the path joins the request."""

from __future__ import annotations

from typing import Any

import pytest

from polar_mitm.routes import ROUTES, Treatment, find, kept_query
from polar_mitm.wire import DIALECTS

ANTHROPIC = {"anthropic-version": "2023-06-01"}
WEBSOCKET = {"sec-websocket-key": "x", "upgrade": "websocket"}


@pytest.mark.parametrize(
    ("host", "path", "dialect", "fields"),
    [
        ("api.openai.com", "/v1/chat/completions", "openai_chat", {}),
        ("openrouter.ai", "/api/v1/chat/completions", "openai_chat", {}),
        ("dashscope.aliyuncs.com", "/compatible-mode/v1/chat/completions", "openai_chat", {}),
        ("generativelanguage.googleapis.com", "/v1beta/openai/chat/completions", "openai_chat", {}),
        ("a.openai.azure.com", "/openai/deployments/mine/chat/completions", "openai_chat", {"model": "mine"}),
        ("127.0.0.1", "/chat/completions", "openai_chat", {}),
        ("127.0.0.1", "//v1/chat/completions/", "openai_chat", {}),
        ("chatgpt.com", "/backend-api/codex/responses", "openai_responses", {}),
        ("api.openai.com", "/v1/responses", "openai_responses", {}),
        ("api.openai.com", "/v1/responses/compact", "openai_responses", {"compacts": True}),
        ("api.anthropic.com", "/v1/messages", "anthropic", {}),
        ("openrouter.ai", "/api/v1/messages", "anthropic", {}),
        (
            "us-east5-aiplatform.googleapis.com",
            "/v1/projects/p/locations/l/publishers/anthropic/models/m@1:streamRawPredict",
            "anthropic",
            {"model": "m@1", "stream": True},
        ),
        (
            "generativelanguage.googleapis.com", "/v1beta/models/gemini-3.8-flash:generateContent", "gemini",
            {"model": "gemini-3.8-flash", "stream": False},
        ),
        (
            "aiplatform.googleapis.com",
            "/v1beta1/projects/p/locations/global/publishers/google/models/m:streamGenerateContent", "gemini",
            {"model": "m", "stream": True},
        ),
    ],
)  # fmt: skip
def test_a_generation_call_is_known_by_its_path(host: str, path: str, dialect: str, fields: dict[str, Any]) -> None:
    """On whatever host and base path; what the path says joins the fields of the body."""
    match = find("POST", host, path, "", {})
    assert (match.treatment, match.dialect.name, match.fields) == (Treatment.GENERATE, dialect, fields)


def test_the_framing_of_a_gemini_stream_stands_in_the_query() -> None:
    """And the API key, which no route reads."""
    match = find("POST", "x", "/v1beta/models/m:streamGenerateContent", "alt=sse&key=secret", {})
    assert match.fields == {"model": "m", "stream": True, "alt": "sse"}


@pytest.mark.parametrize(("query", "kept"), [("key=secret&alt=sse", "alt=sse"), ("key=secret", ""), ("", "")])
def test_a_query_is_dropped_but_for_what_a_route_reads(query: str, kept: str) -> None:
    """Google's keys travel in it."""
    assert kept_query(query) == kept


@pytest.mark.parametrize(
    ("method", "host", "path", "headers", "treatment", "dialect"),
    [
        ("POST", "api.anthropic.com", "/v1/messages/count_tokens", {}, Treatment.COUNT, "anthropic"),
        ("POST", "api.openai.com", "/v1/responses/input_tokens", {}, Treatment.COUNT, "openai_responses"),
        ("POST", "x.googleapis.com", "/v1beta/models/m:countTokens", {}, Treatment.COUNT, "gemini"),
        ("GET", "api.openai.com", "/v1/models", {}, Treatment.MODELS, "openai_chat"),
        ("GET", "openrouter.ai", "/api/v1/models", {}, Treatment.MODELS, "openai_chat"),
        ("GET", "api.openai.com", "/v1/models/gpt-5.2", {}, Treatment.MODEL, "openai_chat"),
        ("GET", "api.anthropic.com", "/v1/models", {}, Treatment.MODELS, "anthropic"),
        ("GET", "127.0.0.1", "/v1/models", ANTHROPIC, Treatment.MODELS, "anthropic"),
        ("GET", "127.0.0.1", "/v1/models/m", ANTHROPIC, Treatment.MODEL, "anthropic"),
        ("GET", "generativelanguage.googleapis.com", "/v1/models", {}, Treatment.MODELS, "gemini"),
        ("GET", "127.0.0.1", "/v1beta/models/m", {}, Treatment.MODEL, "gemini"),
        ("GET", "api.openai.com", "/v1/responses/resp_1", {}, Treatment.STORED, "openai_responses"),
        ("DELETE", "api.openai.com", "/v1/responses/resp_1", {}, Treatment.STORED, "openai_responses"),
        ("GET", "api.openai.com", "/v1/responses", WEBSOCKET, Treatment.WEBSOCKET, "openai_chat"),
    ],
)  # fmt: skip
def test_a_side_route_has_its_own_treatment(
    method: str, host: str, path: str, headers: dict[str, str], treatment: Treatment, dialect: str
) -> None:
    """Answered without a sample, in the shape of the provider that is spoken to."""
    match = find(method, host, path, "", headers)
    assert (match.treatment, match.dialect.name) == (treatment, dialect)


@pytest.mark.parametrize(
    ("method", "host", "path", "headers", "dialect"),
    [
        ("GET", "chatgpt.com", "/backend-api/codex/models", {}, "openai_chat"),
        ("POST", "api.openai.com", "/v1/embeddings", {}, "openai_chat"),
        ("POST", "api.openai.com", "/v1/completions", {}, "openai_chat"),
        ("POST", "api.openai.com", "/v1/threads/t/messages", {}, "openai_chat"),
        ("GET", "api.openai.com", "/v1/chat/completions", {}, "openai_chat"),
        ("GET", "api.openai.com", "/v1/responses", {}, "openai_chat"),
        ("POST", "api.openai.com", "/v1/responses/resp_1/cancel", {}, "openai_chat"),
        ("GET", "api.anthropic.com", "/api/claude_code/settings", {}, "anthropic"),
        ("POST", "127.0.0.1", "/anything", ANTHROPIC, "anthropic"),
        ("POST", "generativelanguage.googleapis.com", "/v1beta/models/m:embedContent", {}, "gemini"),
        ("POST", "evilgoogleapis.com", "/", {}, "openai_chat"),
        ("HEAD", "registry.example.org", "/", {}, "openai_chat"),
    ],
)  # fmt: skip
def test_everything_else_is_refused_in_the_providers_shape(
    method: str, host: str, path: str, headers: dict[str, str], dialect: str
) -> None:
    """At once: the quickest answer for every harness."""
    match = find(method, host, path, "", headers)
    assert (match.treatment, match.dialect.name) == (Treatment.REFUSE, dialect)


def test_every_route_names_a_protocol_that_is_there() -> None:
    """Or none, and then the host and the headers tell."""
    assert {route.dialect for route in ROUTES} == {"", *(dialect.name for dialect in DIALECTS)}


def test_a_path_that_looks_like_a_pattern_is_taken_literally() -> None:
    """Dots and plus signs of the table are no wild cards."""
    assert find("POST", "x", "/v1/messagesX", "", {}).treatment is Treatment.REFUSE
    assert find("POST", "x", "/v1beta/models/a/b:generateContent", "", {}).fields["model"] == "b"
