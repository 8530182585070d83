"""A merged run with branches, a sub-agent and an unrewarded session; its exports, loaded as docs/export.md says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from polar_mitm.conversation import Message, Reasoning, Text, ToolCall, ToolResult, message_json, part_json
from polar_toolkit import export, merge, rewards

ROOT = Path(__file__).parents[3]
SYSTEM = Message("system", (Text("You are an agent."),))
TASK = Message("user", (Text("Write a greeting."),))
CALL = ToolCall("call_1", "task", '{"prompt": "Look at the file first."}')
SUBTASK = Message("user", (Text("Look at the file first."),))
ANSWER = Message("tool", (ToolResult("call_1", "It is empty."),))
MORE = Message("user", (Text("Thank you. Again?"),))
TOOLS = [{"name": "task", "description": "Ask another agent.", "parameters": "{}", "custom": False, "namespace": ""}]
SAMPLED = {"one": [100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110], "two": [200, 201, 202], "three": [300]}
"""The trained tokens of each session, all different; the logprob of token t is -t / 1000."""


@pytest.fixture
def run(tmp_path, book):
    """Session one: a turn, then two branches of it, and a sub-agent; two and three: one turn; three has no reward."""

    def call(name, session, prompt, output, messages, reply, **columns):
        texts = {"messages": json.dumps([message_json(m) for m in messages])}
        texts |= {"reply": json.dumps([part_json(p) for p in reply]), "finish": "stop", "model": "gpt-5.2"}
        texts |= {"tools": None if columns.get("parent") else json.dumps(TOOLS), "user_agent": "pi/1.6.0 (linux)"}
        texts |= {"session_id": session, "logprobs": [-t / 1000 for t in output], "began_ns": 1_700_000_000 * 10**9}
        book.call(name, prompt, output, **texts | columns)

    group = {"group_id": "g"}
    asks = (Reasoning("It may exist."), Text("First I look."), CALL)
    call("a", "one", [1, 2], [100, 101, 102, 103], [SYSTEM, TASK], asks, **group)
    seen = [1, 2, 100, 101, 102, 103, 3]
    call("b", "one", seen, [104, 105], [ANSWER], [Text("Written.")], parent="a", **group)
    span = [{"start": 0, "end": 2, "version": "7"}]
    call("c", "one", [*seen, 4], [106, 107], [MORE], [Text("Yes.")], parent="a", versions=span, **group)
    call(
        "d", "one", [5, 6], [108, 109, 110], [SUBTASK], [Text("It is empty.")], kind="subagent", thread_id="d", **group
    )
    call("e", "two", [1, 2], [200, 201, 202], [SYSTEM, TASK], [Text("No.")], finish="length", **group)
    call("f", "three", [1, 2], [300], [SYSTEM, TASK], [Text("No.")])
    folder = book.write(tmp_path / "run")
    rewards.append(folder, {"one": 1.0, "two": 0.0})
    merge.merge(folder, folder / "merged", merge.Options(), lambda *_: None)
    return folder


@pytest.fixture
def exported(run, tmp_path, monkeypatch):
    """Exports in a format to exported/FORMAT of the working folder; gives that folder and the count."""
    monkeypatch.chdir(tmp_path)

    def write(name, **options):
        out = Path("exported") / name
        return out, export.export(run, name, out, merged=run / "merged", **options)

    return write


@pytest.fixture
def loaded():
    """Runs the loader that docs/export.md gives for a format, in the working folder; gives its names."""
    page = (ROOT / "docs" / "export.md").read_text()
    blocks = re.findall(r"^## (\w+).*?^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)

    def load(name):
        names = {}
        exec(dict(blocks)[name], names)
        return names

    return load


@pytest.fixture
def peers(monkeypatch):
    """Other trainers' packages, without what they depend on, can be found."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / ".peers")])


@pytest.fixture
def as_module(monkeypatch):
    """Makes a module importable under a dotted name, its packages too."""

    def put(name, module):
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, name, module)

    return put


@pytest.fixture
def once():
    """Checks that (token, logprob) pairs are the trained tokens of some sessions, each once."""

    def check(pairs, *sessions):
        pairs = sorted((int(token), round(float(logprob), 4)) for token, logprob in pairs)
        assert pairs == [(t, -t / 1000) for t in sorted(t for name in sessions for t in SAMPLED[name])]

    return check
