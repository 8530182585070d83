"""The official SDKs raise their own exceptions for our errors, plain and in the middle of a stream."""

import json

import anthropic
import openai
import pytest
from google.genai import errors as google

from polar_mitm.conversation import Conversation, Message, Text
from polar_mitm.errors import (
    BadRequest,
    BudgetUsed,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    JournalError,
    NotFound,
    PolarError,
    Sealed,
    TokenizerMismatch,
    TooLarge,
    Unauthorized,
)
from tests.judges.clients import ANTHROPIC, CHAT, GEMINI, JUDGES, PROVIDER, RESPONSES
from tests.mitm.wire.replies import CORE

REQUEST = Conversation("m", (Message("user", (Text("hi"),)),), stream=True)
RAISED = {
    BadRequest("odd"): (openai.BadRequestError, anthropic.BadRequestError, google.ClientError),
    ContextOverflow(5, 4): (openai.BadRequestError, anthropic.BadRequestError, google.ClientError),
    TooLarge("odd"): (openai.APIStatusError, anthropic.RequestTooLargeError, google.ClientError),
    Unauthorized("odd"): (openai.AuthenticationError, anthropic.AuthenticationError, google.ClientError),
    BudgetUsed("odd"): (openai.BadRequestError, anthropic.BadRequestError, google.ClientError),
    Sealed("odd"): (openai.PermissionDeniedError, anthropic.PermissionDeniedError, google.ClientError),
    NotFound("odd"): (openai.NotFoundError, anthropic.NotFoundError, google.ClientError),
    EngineUnavailable("odd"): (openai.InternalServerError, anthropic.OverloadedError, google.ServerError),
    EngineError("odd"): (openai.InternalServerError, anthropic.InternalServerError, google.ServerError),
    TokenizerMismatch("odd"): (openai.InternalServerError, anthropic.InternalServerError, google.ServerError),
    JournalError("odd"): (openai.InternalServerError, anthropic.InternalServerError, google.ServerError),
}
"""What the SDKs of OpenAI, Anthropic and Google raise."""
SDK = {RESPONSES.name: 0, CHAT.name: 0, ANTHROPIC.name: 1, GEMINI.name: 2}
each_judge = pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.dialect.name)
each_error = pytest.mark.parametrize("error", RAISED, ids=lambda error: error.kind)


def _words(dialect, error):
    """The message, in the provider's words."""
    return dialect.error(error)["error"]["message"]


def test_every_error_of_ours_is_judged():
    """A new class of errors.py is not forgotten; what other modules raise is told by no dialect."""
    ours = {kind for kind in PolarError.__subclasses__() if kind.__module__ == PolarError.__module__}
    assert {type(error) for error in RAISED} == ours


@each_judge
@each_error
def test_a_plain_error_raises_the_sdks_own_exception(judge, error):
    """By its status, with the provider's words."""
    dialect = judge.dialect
    PROVIDER.give(json.dumps(dialect.error(error)).encode(), status=dialect.status(error))
    for ask in (judge.plain, judge.streamed):
        with pytest.raises(RAISED[error][SDK[dialect.name]]) as raised:
            ask()
        assert _words(dialect, error) in str(raised.value)
        code = raised.value.code if dialect is GEMINI else raised.value.status_code
        assert code == dialect.status(error)


@each_error
@pytest.mark.parametrize("said", ["", "some words"])
@pytest.mark.parametrize("judge", JUDGES[1:], ids=lambda judge: judge.dialect.name)
def test_an_error_in_a_stream_raises(judge, said, error):
    """Before the first text and after some; the status of the stream stays 200."""
    dialect = judge.dialect
    encoder = dialect.encoder(REQUEST, CORE)
    PROVIDER.give(encoder.begin() + encoder.delta("text", said) + encoder.fail(error), "text/event-stream")
    expected = (openai.APIError, anthropic.APIStatusError, RAISED[error][2])[SDK[dialect.name]]
    with pytest.raises(expected) as raised:
        judge.streamed()
    assert _words(dialect, error) in str(raised.value)


@each_error
def test_a_failed_response_is_the_terminal_event_of_its_stream(error):
    """OpenAI's SDK raises nothing for Responses: it hands the failed response on."""
    encoder = RESPONSES.encoder(REQUEST, CORE)
    PROVIDER.give(encoder.begin() + encoder.delta("text", "x") + encoder.fail(error), "text/event-stream")
    response = JUDGES[0].streamed()
    assert response["status"] == "failed"
    assert response["error"]["message"] == _words(RESPONSES, error)
