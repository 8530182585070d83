"""Deltas of a growing sample: what was given out never changes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.conversation import Message, Part, Reasoning, Text, Tool, ToolCall
from polar_mitm.tokens import Reading, Template

TOOLS = (Tool("run", "runs", '{"type":"object"}'),)
CALL = '\n<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
BROKEN = '\n<tool_call>\n{"name": "run", "arguments": {oops\n</tool_call>'
PIECES = ("a", " ", "\n", "é", "北", "🧭", "<", "think", ">", "</", "tool", "_call")
words = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@st.composite
def samples(draw: st.DrawFn) -> str:
    """Reasoning or not, text, calls well-formed or not, an end or not."""
    thought = draw(st.sampled_from(["", "<think>\n{}\n</think>\n\n", "<think>\n{}"])).format(draw(words))
    return thought + draw(words) + draw(st.sampled_from(["", CALL, BROKEN, CALL + CALL, CALL[:30]])) + draw(
        st.sampled_from(["", "<|im_end|>"])
    )  # fmt: skip


def said(deltas: list[tuple[str, str]], kind: str) -> str:
    return "".join(text for of, text in deltas if of == kind)


def whole(parts: tuple[Part, ...], kind: type[Reasoning | Text]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


@given(samples(), st.data())
def test_deltas_are_a_prefix_of_the_finished_text(qwen3: Template, sample: str, data: st.DataObject) -> None:
    """However the sample is cut into pieces, what was streamed is how the reply begins."""
    ids = np.array(qwen3.encode(sample), np.int32)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    reading = Reading(qwen3, qwen3_prompt(qwen3), TOOLS)
    deltas = [delta for piece in np.split(ids, cuts) for delta in reading.push(piece)]
    parts = reading.finish()
    assert whole(parts, Text).startswith(said(deltas, "text"))
    assert whole(parts, Reasoning).startswith(said(deltas, "reasoning"))
    assert np.array_equal(reading.output_ids, ids)


@given(samples())
def test_token_by_token_gives_the_same_parts_as_at_once(qwen3: Template, sample: str) -> None:
    """Streaming changes nothing in what was said, only when it is said."""
    ids = np.array(qwen3.encode(sample), np.int32)
    slow, fast = (Reading(qwen3, qwen3_prompt(qwen3), TOOLS) for _ in range(2))
    for index in range(len(ids)):
        slow.push(ids[index : index + 1])
    fast.push(ids)
    assert slow.finish() == fast.finish()


def qwen3_prompt(template: Template) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(template.encode("<|im_start|>assistant\n"), np.int32)


def pushed(template: Template, *texts: str) -> list[list[tuple[str, str]]]:
    """The news of each text, pushed one after the other."""
    reading = Reading(template, qwen3_prompt(template), TOOLS)
    return [reading.push(np.array(template.encode(text), np.int32)) for text in texts]


def test_nothing_is_given_out_once_a_call_began(qwen3: Template) -> None:
    """Neither the call nor text behind it: harnesses act on a call before the stream ends."""
    news = pushed(qwen3, "I look.", "\n<tool_call>\n", '{"name": "run", "arguments": {}}', "\n</tool_call>\nDone.")
    assert news == [[("text", "I look.")], [], [], []]


def test_text_in_the_piece_in_which_a_call_begins_waits(qwen3: Template) -> None:
    """It is delivered with the finished reply."""
    assert pushed(qwen3, f"I look.{CALL}") == [[]]


def test_reasoning_comes_before_text(qwen3: Template) -> None:
    """Each as its own kind, the markers are not said."""
    news = [delta for piece in pushed(qwen3, "<think>\nhm", " hm\n</think>\n\nYes", ", two.") for delta in piece]
    assert (said(news, "reasoning"), said(news, "text")) == ("hm hm", "Yes, two.")
    assert [kind for kind, _ in news] == sorted(kind for kind, _ in news)


def test_white_space_at_the_end_waits_for_what_follows(qwen3: Template) -> None:
    """It may be the last of the text, which is trimmed."""
    assert pushed(qwen3, "One.\n\n", "Two.") == [[("text", "One.")], [("text", "\n\nTwo.")]]


def test_half_a_character_waits_for_its_other_half(qwen3: Template) -> None:
    """A character of several tokens is given out whole."""
    ids = np.array(qwen3.encode("🫏"), np.int32)
    assert len(ids) > 1
    reading = Reading(qwen3, qwen3_prompt(qwen3), TOOLS)
    news = [reading.push(ids[i : i + 1]) for i in range(len(ids))]
    assert news == [*([[]] * (len(ids) - 1)), [("text", "🫏")]]


def test_a_broken_call_is_text_in_the_end(qwen3: Template) -> None:
    """It began as a call and was held back; the reply says it as text."""
    reading = Reading(qwen3, qwen3_prompt(qwen3), TOOLS)
    assert reading.push(np.array(qwen3.encode(f"Look.{BROKEN}"), np.int32)) == []
    (text,) = reading.finish()
    assert isinstance(text, Text)
    assert text.text.startswith("Look.\n<tool_call>")


def test_a_long_sample_is_not_read_at_every_piece(qwen3: Template) -> None:
    """Reads grow apart with the sample: the work is O(n log n), not quadratic."""
    reads: list[int] = []

    class Counted:
        def parse(self, output: np.ndarray, prompt: np.ndarray, tools: tuple[Tool, ...]) -> object:
            reads.append(len(output))
            return qwen3.parse(output[:1], prompt, tools)

    reading = Reading(Counted(), qwen3_prompt(qwen3), ())  # pyright: ignore[reportArgumentType] - counts, then reads
    for _ in range(4_000):
        reading.push(np.array([1], np.int32))
    assert len(reads) < 250
    assert max(np.diff(reads)) <= 4_000 / 32 + 1


def test_a_finished_reply_has_the_calls_that_were_held_back(qwen3: Template) -> None:
    """The parts of the whole sample."""
    reading = Reading(qwen3, qwen3_prompt(qwen3), TOOLS)
    reading.push(np.array(qwen3.encode(f"I look.{CALL}<|im_end|>"), np.int32))
    assert reading.finish() == (Text("I look."), ToolCall("", "run", '{"command": "ls"}'))
    assert Message("assistant", reading.finish()).role == "assistant"
