"""Deltas of a growing sample: what was given out never changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.conversation import Part, Reasoning, Text, Tool, ToolCall
from polar_mitm.tokens import Finished, Kind, Reading, Template

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


def said(deltas: list[tuple[Kind, str]], kind: Kind) -> str:
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
    parts = reading.finish().parts
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


def pushed(template: Template, *texts: str) -> list[list[tuple[Kind, str]]]:
    """The news of each text, pushed one after the other."""
    reading = Reading(template, qwen3_prompt(template), TOOLS)
    return [reading.push(np.array(template.encode(text), np.int32)) for text in texts]


def test_nothing_is_given_out_once_a_call_began(qwen3: Template) -> None:
    """Neither the call nor text behind it: harnesses act on a call before the stream ends."""
    news = pushed(qwen3, "I look.", "\n<tool_call>\n", '{"name": "run", "arguments": {}}', "\n</tool_call>\nDone.")
    assert news == [[("text", "I look.")], [], [], []]


def test_text_in_the_piece_in_which_a_call_begins_is_given_out(qwen3: Template) -> None:
    """Without the call: what was spoken before it stands."""
    assert pushed(qwen3, f"I look.{CALL}") == [[("text", "I look.")]]


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
    assert reading.push(np.array(qwen3.encode(f"Look.{BROKEN}"), np.int32)) == [("text", "Look.")]
    (text,) = reading.finish().parts
    assert isinstance(text, Text)
    assert text.text.startswith("Look.\n<tool_call>")


class Counted:
    """The template, and how many ids its parser and its decoder were given."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self.parsed: list[int] = []
        self.decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.template, name)

    def parse(self, output: np.ndarray, prompt: np.ndarray, tools: tuple[Tool, ...]) -> object:
        self.parsed.append(len(output))
        return self.template.parse(output, prompt, tools)

    def decode(self, ids: np.ndarray) -> str:
        self.decoded += len(ids)
        return self.template.decode(ids)


@pytest.mark.parametrize(("word", "parses"), [pytest.param(" word", 2, id="prose"), pytest.param(" {", 250, id="code")])
def test_a_long_sample_is_not_read_at_every_piece(qwen3: Template, word: str, parses: int) -> None:
    """Prose is decoded from where it was left; the parser reads the whole ever more rarely."""
    counted = Counted(qwen3)
    reading = Reading(counted, qwen3_prompt(qwen3), ())  # pyright: ignore[reportArgumentType] - counts, then reads
    (token,) = qwen3.encode(word)
    for _ in range(4_000):
        reading.push(np.array([token], np.int32))
    assert len(counted.parsed) <= parses
    assert counted.decoded < 4_000 * 20


def test_a_finished_reply_has_the_calls_that_were_held_back(qwen3: Template) -> None:
    """The parts of the whole sample."""
    reading = Reading(qwen3, qwen3_prompt(qwen3), TOOLS)
    reading.push(np.array(qwen3.encode(f"I look.{CALL}<|im_end|>"), np.int32))
    assert reading.finish().parts == (Text("I look."), ToolCall("", "run", '{"command": "ls"}'))


# --- stop strings -------------------------------------------------------------------------------------------------


def stopped(
    template: Template, sample: str, stop: tuple[str, ...], size: int
) -> tuple[str, Finished, list[tuple[Kind, str]]]:
    """What was sampled when a stop was found, the reading of it, and the deltas; in pieces of `size` ids."""
    ids, deltas = np.array(template.encode(sample), np.int32), list[tuple[Kind, str]]()
    reading = Reading(template, qwen3_prompt(template), TOOLS, stop=stop)
    for start in range(0, len(ids), size):
        deltas += reading.push(ids[start : start + size])
        if reading.stopped:
            break
    return template.decode(reading.output_ids), reading.finish(), deltas


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("sample", "stop", "text", "kept"),
    [
        pytest.param("One. END Two.", "END", "One.", "One.", id="a token of its own"),
        pytest.param("One.\nObservation: x", "\nObs", "One.", "One.", id="begun by the white space of a token"),
        pytest.param("One two three", "wo t", "One t", None, id="begun and ended inside of tokens"),
        pytest.param("One 🧭 two", "🧭", "One", "One", id="of several tokens for one character"),
        pytest.param("END two", "END", "", "", id="at once"),
        pytest.param(f"One.\n\n{CALL}", "\n", "One.", "One.", id="white space before a call, which is not made"),
        pytest.param("<think>\nEND\n</think>\n\nOne END", "END", "One", "<think>\nEND\n</think>\n\nOne", id="thought"),
    ],
)  # fmt: skip
def test_a_reply_ends_before_a_stop_string(
    qwen3: Template, sample: str, stop: str, text: str, kept: str | None, size: int
) -> None:
    """However it is cut into tokens and pieces; the ids that the reply stands for are told, when some do exactly."""
    sampled, finished, deltas = stopped(qwen3, sample, ("unseen", stop), size)
    ids = np.array(qwen3.encode(sampled), np.int32)
    assert (whole(finished.parts, Text), finished.stopped_by) == (text, stop)
    assert text.startswith(said(deltas, "text"))
    assert finished.extendable is (kept is not None)
    assert kept is None or qwen3.decode(ids[: finished.kept]).rstrip() == kept


@given(words, st.sampled_from(["", "\n", " "]), st.sampled_from(["a 🧭", "\n\n", "北<", "ENDE"]), words)
def test_nothing_of_a_stop_string_is_ever_given_out(
    qwen3: Template, before: str, gap: str, stop: str, after: str
) -> None:
    """Not its beginning either, token by token; and the whole at once ends at the same place."""
    sample = f"x{before}{gap}{stop}{after}"
    _, slow, deltas = stopped(qwen3, sample, (stop,), 1)
    _, fast, _ = stopped(qwen3, sample, (stop,), 1_000)
    text = whole(slow.parts, Text)
    assert stop not in text
    assert text.startswith(said(deltas, "text"))
    assert (slow.parts, slow.stopped_by, slow.kept, slow.extendable) == (
        fast.parts, fast.stopped_by, fast.kept, fast.extendable,
    )  # fmt: skip


def test_a_stop_string_in_a_tool_call_does_not_end_it(qwen3: Template) -> None:
    """Providers look for it in the visible text."""
    _, finished, _ = stopped(qwen3, f"I look.{CALL}", ("ls",), 1)
    assert finished.stopped_by is None
    assert isinstance(finished.parts[-1], ToolCall)


def test_a_reply_without_the_stop_string_stands_for_all_of_its_ids(qwen3: Template) -> None:
    """Its end that looked like the beginning of one is given out after all."""
    _, finished, deltas = stopped(qwen3, "One EN", ("END",), 1)
    assert (finished.parts, finished.kept, finished.stopped_by) == ((Text("One EN"),), None, None)
    assert said(deltas, "text") == "One"


# --- counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "reasoning"),
    [
        ("<think>\nhm, yes\n</think>\n\nYes.<|im_end|>", "<think>\nhm, yes\n</think>"),
        ("<think>\nhm, y", "<think>\nhm, y"),
        ("<think>\nhm", "<think>\nhm"),
        ("Yes.<|im_end|>", ""),
    ],
)
def test_reasoning_is_counted_in_sampled_ids(qwen3: Template, sample: str, reasoning: str) -> None:
    """With its marks, as they were sampled."""
    reading = Reading(qwen3, qwen3_prompt(qwen3), TOOLS)
    reading.push(np.array(qwen3.encode(sample), np.int32))
    assert reading.finish().reasoning == len(qwen3.encode(reasoning))


@pytest.mark.parametrize("end", ["", "<|im_end|>", f"\n{CALL}<|im_end|>"])
def test_the_ids_of_the_visible_text_are_told(qwen3: Template, end: str) -> None:
    """Neither thoughts nor calls nor the end."""
    ids = np.array(qwen3.encode(f"<think>\nhm\n</think>\n\nnaïve 🧭.{end}"), np.int32)
    reading = Reading(qwen3, qwen3_prompt(qwen3), TOOLS)
    reading.push(ids)
    start, stop = reading.finish(scored=True).text
    assert b"".join(map(qwen3.bytes_of, ids[start:stop].tolist())).decode().rstrip() == "naïve 🧭."


def test_a_forced_beginning_is_read_with_the_sample(qwen3: Template) -> None:
    """It stands at the prompt's end and is none of what was sampled."""
    forced = qwen3.forced("run", TOOLS)
    prompt = np.concatenate([qwen3_prompt(qwen3), forced])
    reading = Reading(qwen3, prompt, TOOLS, forced=len(forced))
    assert reading.push(np.array(qwen3.encode(' {"command": "ls"}}\n</tool_call><|im_end|>'), np.int32)) == []
    assert reading.finish().parts == (ToolCall("", "run", '{"command": "ls"}'),)
