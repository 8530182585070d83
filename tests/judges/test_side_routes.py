"""The official SDKs read our model lists and token counts as their own."""

import json

from polar_mitm.routes import Treatment, find
from tests.judges.clients import (
    ANTHROPIC,
    CHAT,
    GEMINI,
    PROVIDER,
    RESPONSES,
    Json,
    anthropic_client,
    google_client,
    openai_client,
)


def _treatment() -> Treatment:
    """Of the last request that an SDK made."""
    asked = PROVIDER.asked
    return find(asked.method, asked.url.host, asked.url.path, asked.url.query.decode(), dict(asked.headers)).treatment


def _give(answer: Json) -> None:
    PROVIDER.give(json.dumps(answer).encode())


def test_openais_sdk_lists_and_finds_models():
    """By their names."""
    _give(CHAT.models(["a", "b"], 4096))
    assert [model.id for model in openai_client().models.list()] == ["a", "b"]
    assert _treatment() is Treatment.MODELS
    _give(CHAT.model("a", 4096))
    assert openai_client().models.retrieve("a").id == "a"
    assert _treatment() is Treatment.MODEL


def test_openais_sdk_counts_tokens():
    """Of a Responses request."""
    _give(RESPONSES.counted(7))
    assert openai_client().responses.input_tokens.count(model="m", input="hi").input_tokens == 7
    assert _treatment() is Treatment.COUNT


def test_anthropics_sdk_lists_and_finds_models():
    """By their names, all on one page."""
    _give(ANTHROPIC.models(["a", "b"], 4096))
    assert [model.id for model in anthropic_client().models.list()] == ["a", "b"]
    assert _treatment() is Treatment.MODELS
    _give(ANTHROPIC.model("a", 4096))
    assert anthropic_client().models.retrieve("a").id == "a"
    assert _treatment() is Treatment.MODEL


def test_anthropics_sdk_counts_tokens():
    """Of a Messages request."""
    _give(ANTHROPIC.counted(7))
    asked = [{"role": "user", "content": "hi"}]
    assert anthropic_client().messages.count_tokens(model="m", messages=asked).input_tokens == 7
    assert _treatment() is Treatment.COUNT


def test_googles_sdk_lists_and_finds_models():
    """By their names, with the context as the limit."""
    _give(GEMINI.models(["a", "b"], 4096))
    assert [model.name for model in google_client().models.list()] == ["models/a", "models/b"]
    assert _treatment() is Treatment.MODELS
    _give(GEMINI.model("a", 4096))
    assert google_client().models.get(model="a").input_token_limit == 4096
    assert _treatment() is Treatment.MODEL


def test_googles_sdk_counts_tokens():
    """Of contents."""
    _give(GEMINI.counted(7))
    assert google_client().models.count_tokens(model="m", contents="hi").total_tokens == 7
    assert _treatment() is Treatment.COUNT
    body = {**json.loads(PROVIDER.asked.content), "model": "m"}
    assert len(GEMINI.decode(body, {}).messages) == 1
