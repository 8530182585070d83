"""Gemini's answers: plain, as events, as an array, with the ids that harnesses return; and errors in Google's shape."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.conversation import Reasoning, Reply, Scored, Text, ToolCall, Usage
from polar_mitm.errors import (
    BadRequest,
    BudgetUsed,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    NotFound,
    PolarError,
    Sealed,
    TooLarge,
    Unauthorized,
)
from polar_mitm.identity import mint, read_pointer
from polar_mitm.wire.gemini import Gemini
from tests.mitm.wire.replies import CORE, REQUEST, began, events, replies, streamed, streams

GEMINI = Gemini()
HI = {"role": "user", "parts": [{"text": "hi"}]}
SIGNATURE = CORE + "AA"


def _decode(**body):
    return GEMINI.decode({"model": "m", "contents": [HI], **body}, {})


SHOWN = _decode(generationConfig={"thinkingConfig": {"includeThoughts": True}})


def test_an_answer_has_googles_shape():
    """Thoughts marked, the signature on the first text and on every call, usage by Google's definitions."""
    parts = (Reasoning("hm"), Text("x"), ToolCall(f"{CORE}02", "run", '{"a": 1}'))
    assert GEMINI.encode(SHOWN, Reply(CORE, parts, "tool_calls", Usage(10, 4, 7, 2))) == {
        "candidates": [
            {
                "content": {
                    "parts": [
                        {"text": "hm", "thought": True},
                        {"text": "x", "thoughtSignature": SIGNATURE},
                        {
                            "functionCall": {"id": f"{CORE}02", "name": "run", "args": {"a": 1}},
                            "thoughtSignature": SIGNATURE,
                        },
                    ],
                    "role": "model",
                },
                "index": 0,
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 10,
            "cachedContentTokenCount": 4,
            "candidatesTokenCount": 5,
            "thoughtsTokenCount": 2,
            "totalTokenCount": 17,
            "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 10}],
        },
        "modelVersion": "m",
        "responseId": CORE,
    }


def test_thoughts_are_shown_only_to_who_asks():
    """They count all the same; streamed thoughts send nothing."""
    reply, hidden = Reply(CORE, (Reasoning("hm"), Text("x")), "stop", Usage(1, 0, 5, 4)), _decode()
    answer = GEMINI.encode(hidden, reply)
    assert answer["candidates"][0]["content"]["parts"] == [{"text": "x", "thoughtSignature": SIGNATURE}]
    assert answer["usageMetadata"]["thoughtsTokenCount"] == 4
    assert GEMINI.encoder(hidden, CORE).delta("reasoning", "hm") == b""
    assert b"hm" not in streamed(GEMINI, reply, hidden)


def test_an_answer_that_says_nothing_still_has_a_signed_part():
    """A content without parts is no answer for Gemini CLI."""
    for parts in ((), (Reasoning("hm"),)):
        content = GEMINI.encode(SHOWN, Reply(CORE, parts, "length"))["candidates"][0]
        assert content["content"]["parts"][-1] == {"text": "", "thoughtSignature": SIGNATURE}
        assert content["finishReason"] == "MAX_TOKENS"


@pytest.mark.parametrize(
    "arguments", ["{not json", "[1]", '"x"', "null", "", '{"_arguments": "x"}', '{"_arguments": 1}']
)
def test_arguments_that_are_no_object_survive_the_round_trip(arguments):
    """`args` must be an object: they travel as the one argument of it, and the history still matches."""
    call = ToolCall(f"{CORE}00", "run", arguments)
    content = GEMINI.encode(REQUEST, Reply(CORE, (call,), "tool_calls"))["candidates"][0]["content"]
    assert content["parts"][0]["functionCall"]["args"] == {"_arguments": arguments}
    assert _decode(contents=[HI, content, HI]).messages[1].parts == (call,)


@given(data=st.data())
def test_the_last_chunk_alone_has_finish_reason_and_usage(data):
    """Every chunk has a part, the model's role, an index and the envelope; the first text and all calls are signed."""
    reply = data.draw(replies("", custom=False))
    chunks = [value for _, value in events(b"".join(data.draw(streams(GEMINI, reply, SHOWN))))]
    candidates = [chunk["candidates"][0] for chunk in chunks]
    assert [("finishReason" in c, "usageMetadata" in v) for c, v in zip(candidates, chunks, strict=True)] == [
        *[(False, False)] * (len(chunks) - 1),
        (True, True),
    ]
    assert all(chunk["responseId"] == CORE and chunk["modelVersion"] == "m" for chunk in chunks)
    parts = [part for candidate in candidates for part in candidate["content"]["parts"]]
    assert all("thoughtSignature" in part for part in parts if "functionCall" in part)
    texts = [part for part in parts if "text" in part and not part.get("thought")]
    signed = ["thoughtSignature" in part for part in texts]
    assert signed in ([], [True, *[False] * (len(texts) - 1)], [False])


@given(data=st.data())
def test_without_sse_the_chunks_are_one_json_array(data):
    """Written piece by piece, as JSON; the same chunks as the events."""
    reply = data.draw(replies("", custom=False))
    array = _decode(stream=True, generationConfig={"thinkingConfig": {"includeThoughts": True}})
    assert GEMINI.encoder(array, CORE).content_type.startswith("application/json")
    whole = json.loads(streamed(GEMINI, reply, array))
    assert whole == [value for _, value in events(streamed(GEMINI, reply, SHOWN))]
    pieces = data.draw(streams(GEMINI, reply, array))
    assert json.loads(b"".join(pieces))[-1]["candidates"][0]["finishReason"]


def test_a_stream_says_nothing_before_its_first_chunk():
    """Gemini CLI waits for the headers only, and fails on comments."""
    encoder = GEMINI.encoder(SHOWN, CORE)
    assert (encoder.begin(), encoder.ping, encoder.content_type) == (b"", b"", "text/event-stream")


def test_every_choice_is_a_candidate_with_ids_of_its_own():
    """The prompt counts once; a later choice's signature comes with its end."""
    other = CORE[:21] + "1" + CORE[22:]
    reply = Reply(
        CORE, (Text("a"),), "stop", Usage(5, 0, 2), others=(Reply(other, (Text("b"),), "length", Usage(5, 0, 3)),)
    )
    answer = GEMINI.encode(SHOWN, reply)
    assert [c["content"]["parts"][0]["thoughtSignature"] for c in answer["candidates"]] == [SIGNATURE, other + "AA"]
    assert answer["usageMetadata"]["totalTokenCount"] == 10
    encoder = GEMINI.encoder(SHOWN, CORE)
    sent = encoder.delta("text", "a") + encoder.delta("text", "b", 1) + encoder.finish(reply)
    chunks = [value["candidates"][0] for _, value in events(sent)]
    assert [(c["index"], c.get("finishReason")) for c in chunks] == [
        (0, None),
        (1, None),
        (0, "STOP"),
        (1, "MAX_TOKENS"),
    ]
    assert [p["thoughtSignature"] for c in chunks for p in c["content"]["parts"] if "thoughtSignature" in p] == [
        SIGNATURE,
        other + "AA",
    ]


def test_logprobs_of_the_visible_text_are_told():
    """Only when the reply holds them."""
    reply = Reply(CORE, (Text("ab"),), "stop", scored=(Scored(b"a", -1.0), Scored(b"\xff", -3.0)))
    end = GEMINI.encode(SHOWN, reply)["candidates"][0]
    assert end["avgLogprobs"] == -2.0
    assert end["logprobsResult"]["chosenCandidates"][1] == {"token": "\ufffd", "logProbability": -3.0}
    assert "avgLogprobs" not in GEMINI.encode(SHOWN, Reply(CORE, (), "stop"))["candidates"][0]


@pytest.mark.parametrize("place", ["{}AA", "run__{}00", "{}00"])
def test_a_minted_id_is_read_back_from_where_it_stands(place):
    """In a thought signature, and in a call's id with or without the tool's name."""
    key, call_id = b"k" * 32, "abcdefghij234567klmn"
    assert read_pointer(key, "s", place.format(mint(key, "s", call_id, 3))) == (call_id, 3)


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (BadRequest("x"), 400, "INVALID_ARGUMENT"),
        (Unauthorized("x"), 401, "UNAUTHENTICATED"),
        (Sealed("x"), 403, "PERMISSION_DENIED"),
        (TooLarge("x"), 413, "INVALID_ARGUMENT"),
        (NotFound("x"), 404, "NOT_FOUND"),
        (EngineError("x"), 500, "INTERNAL"),
        (EngineUnavailable("x"), 503, "UNAVAILABLE"),
    ],
)
def test_an_error_has_googles_shape(error: PolarError, code: int, status: str):
    """Plain, in a stream of events and in an array, at its start and in its middle."""
    body = {"error": {"code": code, "message": "x", "status": status}}
    assert (GEMINI.status(error), GEMINI.error(error)) == (code, body)
    assert events(began(GEMINI.encoder(SHOWN, CORE)).fail(error)) == [("", body)]
    array = GEMINI.encoder(_decode(stream=True), CORE)
    assert json.loads(GEMINI.encoder(_decode(stream=True), CORE).fail(error)) == [body]
    assert json.loads(array.delta("text", "x") + array.fail(error))[1] == body


def test_a_used_budget_is_worded_as_a_quota_of_the_day():
    """A 429; without a quota of the day in its details, Gemini CLI waits and sends it again."""
    error = BudgetUsed("session 's' has used its 2 turns")
    assert GEMINI.status(error) == 429
    body = GEMINI.error(error)["error"]
    assert (body["code"], body["status"]) == (429, "RESOURCE_EXHAUSTED")
    assert "exceeded your current quota, please check your plan and billing" in body["message"]
    assert "PerDay" in body["details"][0]["violations"][0]["quotaId"]


def test_an_overflow_is_worded_as_google_does():
    """Both figures in its words."""
    assert GEMINI.error(ContextOverflow(5000, 4096))["error"] == {
        "code": 400,
        "message": "The input token count (5000) exceeds the maximum number of tokens allowed (4096).",
        "status": "INVALID_ARGUMENT",
    }
