"""The ids that harnesses echo: each listed field names the reply by itself, and nothing else in a request does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from polar_mitm.identity import load_key, mint
from polar_mitm.tokens import Template
from polar_toolkit.rollout.harnesses.scripted_engine import Fault, ScriptedEngine
from tests.mitm.house import Caller, House, eventually, open_house
from tests.mitm.protocols import ANTHROPIC, CHAT, EVERY, GEMINI, RESPONSES, Protocol

Json = dict[str, Any]
THOUGHT = "<think>\nThe user wants the files.\n</think>\n\n"
ACT = 'I look.\n<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
REPLIES = {"act": ACT, "think and act": THOUGHT + ACT, "say": "Fine.", "think and say": f"{THOUGHT}Fine."}
CORE = re.compile(r"[a-z2-7]{20}[0-9a-f]{2}[a-z2-7]{8}")
FIELDS: dict[Protocol, dict[str, tuple[str, ...]]] = {
    RESPONSES: {
        "call_id": ("act", "think and act"),
        "id": ("act", "think and act", "say", "think and say"),
        "encrypted_content": ("act", "think and act", "say", "think and say"),
    },
    ANTHROPIC: {
        "id": ("act", "think and act"),
        "tool_use_id": ("act", "think and act"),
        "signature": ("think and act", "think and say"),
        "data": ("act", "say"),
        "previous_message_id": ("act", "think and act", "say", "think and say"),
    },
    CHAT: {
        "id": ("act", "think and act", "say", "think and say"),
        "tool_call_id": ("act", "think and act"),
        "data": ("act", "think and act", "say", "think and say"),
        "signature": ("think and act", "think and say"),
    },
    GEMINI: {
        "id": ("act", "think and act"),
        "thoughtSignature": ("act", "think and act", "say", "think and say"),
    },
}
"""By protocol, the fields that harnesses return (Codex 0.171.0, Claude Code 2.1.332, Pi 1.6.0, Qwen Code 0.24.4, Gemini
CLI 0.61.0, opencode 1.18.33, mini-swe-agent 2.4.6), and the replies that have them."""
by_protocol = pytest.mark.parametrize("protocol", EVERY, ids=lambda p: p.name)


@pytest.fixture(scope="module")
def house(qwen3: Template, qwen3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[House]:
    """One for all: each conversation begins with words of its own. It says what its first message asks for."""

    def play(prompt: str) -> str:
        return REPLIES[prompt.split("Do: ", 1)[1].split(".", 1)[0]]

    run = tmp_path_factory.mktemp("run")
    with ScriptedEngine(qwen3_folder, play).serving() as engine, open_house(run, engine.url, qwen3) as opened:
        yield opened


class Talk:
    """A conversation of one reply, and what follows it."""

    def __init__(self, house: House, protocol: Protocol, reply: str, title: str) -> None:
        self._house, self._protocol = house, protocol
        body = protocol.ask(f"{title} Do: {reply}.")
        self.answer: Json = house.post(protocol.path, body).json()
        core = CORE.search(json.dumps(self.answer))
        assert core is not None
        self.core = core.group()
        self.call_id = self.core[:20]
        self.follow = protocol.follow(body, self.answer, "a.txt")
        if protocol is ANTHROPIC:
            self.follow["diagnostics"] = {"previous_message_id": self.answer["id"]}

    def go_on(self, change: Callable[[str, str], str]) -> str:
        """The id of the next call, after a change of (field, text) of every text of the request."""
        response = self._house.post(self._protocol.path, changed(self.follow, change))
        assert response.status_code == 200, response.text
        core = CORE.search(response.text)
        assert core is not None
        return core.group()[:20]


def changed(value: Any, change: Callable[[str, str], str], field: str = "") -> Any:
    """JSON with every text changed, which is told the field that it stands in."""
    if isinstance(value, dict):
        return {name: changed(inner, change, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [changed(inner, change, field) for inner in value]
    return change(field, value) if isinstance(value, str) else value


def without(text: str) -> str:
    """A text whose ids are nobody's, each still its own."""
    return CORE.sub("0" * 30, text)


@by_protocol
def test_each_listed_field_names_the_reply_by_itself(house: House, protocol: Protocol) -> None:
    """When every other id of the request was replaced, also after a reply without calls or reasoning."""
    talks = {reply: Talk(house, protocol, reply, f"{protocol.name}: one field.") for reply in REPLIES}
    cases = [(field, reply) for field, replies in FIELDS[protocol].items() for reply in replies]
    asked = {
        (field, reply): talks[reply].go_on(lambda name, text, kept=field: text if name == kept else without(text))
        for field, reply in cases
    }
    rows = {row["call_id"]: row for row in house.calls()}
    found = {case: (rows[call]["parent_call_id"], rows[call]["parent_evidence"]) for case, call in asked.items()}
    assert found == {(field, reply): (talks[reply].call_id, "pointer") for field, reply in cases}


@by_protocol
def test_ids_fit_where_harnesses_keep_them(house: House, protocol: Protocol) -> None:
    """At most 64 characters of [A-Za-z0-9_-]: Pi replaces longer ones, litellm and opencode other characters."""
    for reply in REPLIES:
        answer = Talk(house, protocol, reply, f"{protocol.name}: shapes.").answer
        ids = [text for _, text in texts(answer) if CORE.search(text)]
        assert ids
        assert [text for text in ids if not re.fullmatch(r"[A-Za-z0-9_-]{30,64}", text)] == []
        signatures = [text for name, text in texts(answer) if name == "thoughtSignature"]
        assert [text for text in signatures if len(text) % 4] == []


def texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Every text with its field."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from texts(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner, field)
    elif isinstance(value, str):
        yield field, value


FORGERIES: dict[str, Callable[[str, bytes], str]] = {
    "another MAC": lambda core, key: core[:-1] + ("a" if core[-1] != "a" else "b"),
    "another call": lambda core, key: ("a" if core[0] != "a" else "b") + core[1:],
    "another choice": lambda core, key: core[:20] + "01" + core[22:],
    "another session": lambda core, key: mint(key, "another", core[:20]),
    "another run": lambda core, key: mint(b"another key", "default", core[:20]),
    "cut off": lambda core, key: core[:-1],
    "upper case": lambda core, key: core.upper(),
    "far behind": lambda core, key: "x" * 1000 + core,
    "huge": lambda core, key: "a" * 200_000,
    "foreign": lambda core, key: "rs_68af4030baa48193b0b43b4c2a176a1a0e6967589f080e77",
    "no text of ours": lambda core, key: "é\u2603\x00",
}


@by_protocol
def test_an_id_that_is_not_ours_names_nobody(house: House, protocol: Protocol) -> None:
    """In whatever field: the history says whose child the call is, and without it nothing does."""
    talk, key = Talk(house, protocol, "think and act", f"{protocol.name}: forged."), load_key(house.run)
    asked: dict[str, tuple[str, str]] = {}
    for name, forge in FORGERIES.items():
        text = forge(talk.core, key)
        faithful = talk.go_on(lambda _, said, put=text: CORE.sub(lambda _: put, said))
        edited = talk.go_on(
            lambda _, said, put=text: CORE.sub(lambda _: put, said).replace("forged.", "forged, edited.")
        )
        asked[name] = faithful, edited
    rows = {row["call_id"]: row for row in house.calls()}
    for name, (faithful, edited) in asked.items():
        child, root = rows[faithful], rows[edited]
        assert (child["parent_call_id"], child["parent_evidence"]) == (talk.call_id, "history"), name
        found = root["parent_call_id"], root["root_reason"], root["root_window"]
        assert found == (None, "unknown_history", None), name


@by_protocol
def test_an_id_in_words_names_nobody(house: House, protocol: Protocol) -> None:
    """Tool output and the user's words could say anything: they are no id fields."""
    talk = Talk(house, protocol, "act", f"{protocol.name}: words.")

    def said(_: str, text: str) -> str:
        words = f" call_{talk.core}00" if text == "a.txt" or "Do: act" in text else ""
        return without(text) + words

    call = talk.go_on(said)
    (row,) = [row for row in house.calls() if row["call_id"] == call]
    assert (row["parent_call_id"], row["root_reason"]) == (None, "unknown_history")


@by_protocol
def test_two_calls_at_once_with_one_parent_are_two_branches(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path, protocol: Protocol
) -> None:
    """Neither waits for the other, nor takes its context: each begins with the parent's, and ends in its own."""

    def play(prompt: str) -> str:
        return "One." if "a.txt" in prompt else "Two." if "b.txt" in prompt else ACT

    with ScriptedEngine(qwen3_folder, play).serving() as engine, open_house(tmp_path, engine.url, qwen3) as house:
        body = protocol.ask("first")
        answer = house.post(protocol.path, body).json()
        engine.faults += [Fault("hold", after=1), Fault("hold", after=1)]
        path = protocol.at(stream=True)
        callers = [
            Caller(house, path, protocol.follow(body, answer, name) | {"stream": True}) for name in ("a.txt", "b.txt")
        ]
        eventually(lambda: sum(len(call.output_ids) == 1 for call in engine.calls) == 2)

        def ended() -> bool:
            engine.release()
            return all(caller.got(protocol.done, 0.01) for caller in callers)

        eventually(ended)
        for caller in callers:
            caller.rest()
    first, *branches = house.calls()
    assert [row["parent_call_id"] for row in branches] == [first["call_id"]] * 2
    assert {row["prompt_shared"] for row in branches} == {first["prompt_len"] + len(first["output_ids"])}
    assert len({bytes(row["prompt_hash"]) for row in branches}) == 2
