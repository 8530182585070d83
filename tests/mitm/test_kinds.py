"""What kind of call a request is: declarations, fingerprints, shapes, and the requests of real harnesses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.conversation import Compaction, Conversation, Message, Part, Sampling, Text, Tool, ToolCall, ToolResult
from polar_mitm.identity import DEFAULT_SESSION, Kind, Session
from polar_mitm.kinds import AGENT, Kinds, Verdict
from polar_mitm.tips import Parent, Tip
from polar_mitm.tokens import Template
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from tests.mitm.house import eventually, open_house
from tests.mitm.protocols import CHAT

KNOWN = Session("s", registered=True)
TOOLS = (Tool("run", "runs", "{}"),)


def says(role: str, text: str) -> Message:
    return Message(role, (Text(text),))  # pyright: ignore[reportArgumentType]


TASK = says("user", "Create hello.txt containing hello")
CALLED = Message("assistant", (ToolCall("call_1", "run", '{"command": "ls"}'),))
RESULT = Message("tool", (ToolResult("call_1", "a.txt\n"),))


def request(
    *messages: Message, tools: bool = True, schema: str | None = None, compacts: Compaction | None = None
) -> Conversation:
    return Conversation("m", messages, TOOLS if tools else (), sampling=Sampling(json_schema=schema), compacts=compacts)


def judged(kinds: Kinds, asked: Conversation, parent: Parent | None = None, **headers: str) -> Verdict:
    """The verdict on a request of session s."""
    declared = kinds.declared(Session("s"), {k.replace("_", "-"): v for k, v in headers.items()})
    return kinds.judge("s", asked, declared, parent)


def kind_of(kinds: Kinds, asked: Conversation, **headers: str) -> Kind:
    return judged(kinds, asked, **headers).kind


# --- fingerprints -------------------------------------------------------------------------------------------------


def test_an_interactive_session_takes_any_harness() -> None:
    """Its user may run one harness after the other."""
    kinds, mine = Kinds(), Session(DEFAULT_SESSION)
    for agent in ("pi/1.6.0", "codex_exec/0.171.0"):
        assert kinds.declared(mine, {"user-agent": agent}) == AGENT


def test_a_shell_that_uses_the_sessions_credentials_is_foreign() -> None:
    """The agent's shell inherits the proxy address: curl in a session of Claude Code is not its model call."""
    kinds = Kinds()
    assert kinds.declared(KNOWN, {"user-agent": "claude-cli/2.1.332 (external, cli)"}) == AGENT
    assert kinds.declared(KNOWN, {"user-agent": "curl/8.5.0"}) == Verdict("foreign", "fingerprint")
    assert kinds.declared(KNOWN, {}).kind == "foreign"


def test_a_foreign_call_stays_foreign_and_shows_nothing() -> None:
    """Its tools are not the harness's."""
    kinds = Kinds()
    kinds.declared(KNOWN, {"user-agent": "pi/1.6.0"})
    foreign = kinds.declared(KNOWN, {"user-agent": "curl/8"})
    assert kinds.judge("s", request(TASK), foreign, None).kind == "foreign"
    assert not kinds.shows_tools("s")


def test_another_version_of_the_same_harness_is_not_foreign() -> None:
    """The product is compared, without its version."""
    kinds = Kinds()
    for agent in ("codex_exec/0.171.0", "codex_exec/0.172.0 (x)"):
        assert kinds.declared(KNOWN, {"user-agent": agent}) == AGENT


def test_each_session_has_its_own_fingerprint() -> None:
    """The first caller of a session is its harness."""
    kinds = Kinds()
    for session, agent in (("s", "a/1"), ("t", "b/1")):
        assert kinds.declared(Session(session, registered=True), {"user-agent": agent}) == AGENT


# --- what harnesses declare ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "value", "kind"),
    [
        ("x-claude-code-agent-id", "a5070606f13df22ea", "subagent"),
        ("x-claude-code-request-class", "subagent", "subagent"),
        ("x-claude-code-request-class", "workflow", "subagent"),
        ("x-claude-code-request-class", "compaction", "compaction"),
        ("x-claude-code-request-class", "auxiliary", "auxiliary"),
        ("x-claude-code-request-class", "side_reply", "auxiliary"),
        ("x-claude-code-request-class", "main", "agent"),
        ("x-claude-code-request-class", "of a later version", "agent"),
        ("x-openai-subagent", "review", "subagent"),
        ("x-openai-subagent", "compact", "compaction"),
        ("x-codex-parent-thread-id", "0198", "subagent"),
        ("x-codex-turn-metadata", '{"request_kind": "turn", "agent_name": "main"}', "agent"),
        ("x-codex-turn-metadata", '{"request_kind": "compaction"}', "compaction"),
        ("x-codex-turn-metadata", '{"request_kind": "turn", "subagent_kind": "review"}', "subagent"),
    ],
)
def test_a_harness_says_what_kind_a_call_is(header: str, value: str, kind: Kind) -> None:
    """Claude Code 2.1.332 and Codex 0.171.0 have headers for it."""
    verdict = Kinds().declared(KNOWN, {"user-agent": "x/2", header: value})
    assert verdict == (AGENT if kind == "agent" else Verdict(kind, "header"))


def test_a_declared_kind_beats_the_shape() -> None:
    """A sub-agent without tools is no title."""
    kinds = Kinds()
    judged(kinds, request(TASK))
    assert kind_of(kinds, request(TASK, tools=False), x_claude_code_agent_id="a1") == "subagent"


@given(st.text(max_size=50) | st.sampled_from(["[" * 100_000, "[]", "{}", "null", '{"request_kind": []}']))
def test_any_header_is_read_without_an_error(text: str) -> None:
    """What is no JSON object declares nothing."""
    assert Kinds().declared(KNOWN, {"x-codex-turn-metadata": text}) == AGENT


# --- shapes -------------------------------------------------------------------------------------------------------


def test_a_harness_that_never_offers_tools_is_an_agent() -> None:
    """No tools are no evidence where nobody has any."""
    kinds = Kinds()
    assert judged(kinds, request(TASK, tools=False)) == AGENT
    assert judged(kinds, request(TASK, says("assistant", "Hm."), TASK, tools=False)) == AGENT


def test_the_kind_of_a_call_without_tools_depends_on_what_its_session_shows() -> None:
    """A title that is asked for before the agent's first call is told by judging it again."""
    kinds, title = Kinds(), request(says("user", "Generate a title for this conversation:\n"), TASK, tools=False)
    assert judged(kinds, title) == AGENT
    assert judged(kinds, request(TASK)) == AGENT
    assert judged(kinds, title) == Verdict("auxiliary", "shape")


def test_an_agent_that_is_asked_for_its_last_words_without_tools_is_an_agent() -> None:
    """Its history holds the calls that it made: only the choice of a tool is taken away."""
    kinds = Kinds()
    judged(kinds, request(TASK))
    assert judged(kinds, request(TASK, CALLED, RESULT, tools=False)) == AGENT


def test_one_sessions_tools_say_nothing_of_another() -> None:
    """Sessions are different programs."""
    kinds = Kinds()
    kinds.judge("t", request(TASK), AGENT, None)
    assert judged(kinds, request(TASK, tools=False)) == AGENT


SUMMARIES = {
    "codex 0.171.0, custom provider": [
        says("system", "You are a coding agent."), TASK, CALLED, RESULT,
        says("user", "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff for another LLM."),
    ],
    "opencode 1.18.33": [
        says("system", "You are a context summarization agent. You are given a session."),
        says("user", "[user] Create hello.txt [assistant] Done."),
    ],
    "pi 1.6.0": [
        says("system", "You are a context summarization assistant. Your task is to read a conversation."),
        says("user", "<conversation>" + "x" * 5_000 + "</conversation> The messages above are to be summarised."),
    ],
    "claude code 2.1.332, its words": [
        says("system", "You are a helpful AI assistant tasked with summarizing conversations."), TASK, CALLED, RESULT,
        says("user", "Your task is to create a detailed summary of the conversation so far."),
    ],
    "gemini cli 0.61.0, its words": [
        says("system", "You are the component that summarizes internal chat history into a given structure."),
        says("user", "First, reason in your scratchpad. Then, generate the snapshot."),
    ],
}  # fmt: skip


@pytest.mark.parametrize("messages", SUMMARIES.values(), ids=SUMMARIES)
def test_a_call_without_tools_that_is_to_sum_up_is_a_compaction(messages: list[Message]) -> None:
    """Told by the words of the system or of the last message."""
    kinds = Kinds()
    judged(kinds, request(TASK))
    assert judged(kinds, request(*messages, tools=False)) == Verdict("compaction", "shape")


def test_a_task_about_summaries_is_no_compaction() -> None:
    """An agent may be asked to sum something up: it has its tools."""
    asked = request(says("user", "Write a summary of the conversation in chat.log to sum.txt."))
    assert judged(Kinds(), asked) == AGENT


def test_a_tool_result_about_summaries_is_no_evidence() -> None:
    """Only the system and the user say what a call is for."""
    kinds = Kinds()
    judged(kinds, request(TASK))
    told = Message("tool", (ToolResult("call_1", "summary of the conversation"),))
    assert judged(kinds, request(TASK, CALLED, told, tools=False)) == AGENT


# --- sub-agents ---------------------------------------------------------------------------------------------------

PROMPT = "Find every caller of parse() and list them."


def asks(prompt: str) -> tuple[Part, ...]:
    return (ToolCall("call_1", "task", json.dumps({"description": "find", "prompt": prompt})),)


def test_a_call_that_asks_what_a_tool_call_said_is_a_subagents() -> None:
    """Harnesses hand the argument of their agent tool on as the first message."""
    kinds = Kinds()
    kinds.spawns("s", asks(f"{PROMPT}\n"))
    assert judged(kinds, request(says("system", "You are a worker."), says("user", PROMPT))) == Verdict(
        "subagent", "prompt"
    )
    assert judged(kinds, request(TASK)) == AGENT


def test_what_continues_a_subagent_is_a_subagents() -> None:
    """Told by the tree."""
    tip = Tip("one", 0, np.zeros(1, np.int32), np.zeros(1, np.int32), b"", b"", kind="subagent")
    asked = request(says("user", PROMPT), CALLED, RESULT)
    assert judged(Kinds(), asked, Parent(tip, "pointer", 2)) == Verdict("subagent", "tree")


def test_a_short_argument_is_no_prompt() -> None:
    """A command that the user says again is not a sub-agent's task."""
    kinds = Kinds()
    kinds.spawns("s", (ToolCall("call_1", "run", '{"command": "ls"}'), ToolCall("call_2", "run", "no JSON")))
    assert judged(kinds, request(says("user", "ls"))) == AGENT


def test_an_empty_prompt_is_nobodys() -> None:
    """A request without a user's message, or without text, was asked by no tool call."""
    kinds = Kinds()
    kinds.spawns("s", asks(" " * 40))
    assert judged(kinds, request(says("system", "Go."))) == AGENT


# --- the requests of real harnesses, in the order in which they came ----------------------------------------------

SYSTEM = says("system", "You are a coding agent.")
ROUTER = request(SYSTEM, TASK, tools=False, schema='{"type":"object"}')
TURN_1, TURN_2 = request(SYSTEM, TASK), request(SYSTEM, TASK, CALLED, RESULT)
TITLE = request(
    says("system", "You are a title generator. Never use the word summarizing for the conversation." + "." * 2_000),
    says("user", "Generate a title for this conversation:\n"), says("user", f'"{TASK.parts[0]}"'), tools=False,
)  # fmt: skip
CHECKPOINT = request(*SUMMARIES["codex 0.171.0, custom provider"], tools=False)
MAIN = {"x_claude_code_request_class": "main"}
WORKER = {"x_claude_code_request_class": "subagent", "x_claude_code_agent_id": "a5070606f13df22ea"}
CODEX = {"x_codex_turn_metadata": '{"request_kind": "turn"}'}
CODEX_SUMS = {"x_codex_turn_metadata": '{"request_kind": "compaction"}'}
TRIGGER = request(SYSTEM, TASK, CALLED, RESULT, compacts="item")

CAPTURES: dict[str, list[tuple[Conversation, dict[str, str], Kind]]] = {
    "claude code 2.1.332": [(TURN_1, MAIN, "agent"), (TURN_2, MAIN, "agent")],
    "claude code 2.1.332, resumed": [(request(SYSTEM, TASK, CALLED, RESULT, CALLED, TASK), MAIN, "agent")],
    "claude code 2.1.332, sub-agent": [
        (TURN_1, MAIN, "agent"), (TURN_2, MAIN, "agent"), (TURN_1, WORKER, "subagent"), (TURN_2, WORKER, "subagent"),
        (TURN_2, MAIN, "agent"),
    ],
    "codex 0.171.0": [(TURN_1, CODEX, "agent"), (TURN_2, CODEX, "agent")],
    "codex 0.171.0, default model: tools in an input item": [(TURN_1, CODEX, "agent"), (TURN_2, CODEX, "agent")],
    "codex 0.171.0, compaction": [
        (TURN_1, CODEX, "agent"), (TRIGGER, CODEX_SUMS, "compaction"), (TURN_1, CODEX, "agent"),
        (TRIGGER, CODEX_SUMS, "compaction"),
    ],
    "codex 0.171.0, custom provider, compaction": [
        (TURN_1, CODEX, "agent"), (CHECKPOINT, CODEX_SUMS, "compaction"), (TURN_1, CODEX, "agent"),
        (CHECKPOINT, CODEX_SUMS, "compaction"), (TURN_1, CODEX, "agent"), (CHECKPOINT, CODEX_SUMS, "compaction"),
    ],
    "codex 0.171.0, custom provider, compaction without its headers": [
        (TURN_1, {}, "agent"), (CHECKPOINT, {}, "compaction"), (TURN_1, {}, "agent"),
    ],
    "gemini cli 0.61.0": [(ROUTER, {}, "auxiliary"), (TURN_1, {}, "agent"), (TURN_2, {}, "agent")],
    "mini-swe-agent 2.4.6": [(TURN_1, {}, "agent"), (TURN_2, {}, "agent")],
    "opencode 1.18.33, title second": [(TURN_1, {}, "agent"), (TITLE, {}, "auxiliary"), (TURN_2, {}, "agent")],
    "pi 1.6.0, four protocols": [(TURN_1, {}, "agent"), (TURN_2, {}, "agent")],
    "qwen code 0.24.4": [(TURN_1, {}, "agent"), (TURN_2, {}, "agent")],
}  # fmt: skip


@pytest.mark.parametrize("calls", CAPTURES.values(), ids=CAPTURES)
def test_the_calls_of_a_real_harness_are_told_apart(calls: list[tuple[Conversation, dict[str, str], Kind]]) -> None:
    """The shapes of captured requests, each with the kind that it must get."""
    kinds = Kinds()
    assert [kind_of(kinds, asked, **headers) for asked, headers, _ in calls] == [kind for _, _, kind in calls]


# --- in the rows --------------------------------------------------------------------------------------------------


def test_a_title_that_was_finished_first_gets_its_kind_when_the_agent_calls(
    qwen3: Template, qwen3_folder: Path, tmp_path: Path
) -> None:
    """opencode 1.18.33 asks for a title beside its first turn: the row of the title is corrected."""
    title = CHAT.ask("Generate a title for this conversation")
    del title["tools"]
    with (
        ScriptedEngine(qwen3_folder, ["A file", "Hello."]).serving() as engine,
        open_house(tmp_path, engine.url, qwen3) as house,
    ):
        house.post(CHAT.path, title)
        eventually(lambda: house.calls()[0]["client_delivered"])
        assert house.calls()[0]["kind"] == "agent"
        house.post(CHAT.path, CHAT.ask("Create hello.txt."))
        eventually(lambda: house.calls()[0]["kind"] == "auxiliary")
    row, turn = house.calls()
    assert (row["kind_evidence"], row["client_delivered"], row["status"]) == ("shape", True, "completed")
    assert (turn["kind"], turn["kind_evidence"], turn["thread_id"]) == ("agent", "default", None)


def test_a_subagents_calls_are_a_thread_of_their_own(qwen3: Template, qwen3_folder: Path, tmp_path: Path) -> None:
    """Told without any header: its first words are the argument of the tool call that made it."""
    spawn = {"name": "run", "arguments": {"command": PROMPT}}
    replies = [f"<tool_call>\n{json.dumps(spawn)}\n</tool_call>", "Found none.", "None at all.", "Well."]
    with (
        ScriptedEngine(qwen3_folder, replies).serving() as engine,
        open_house(tmp_path, engine.url, qwen3) as house,
    ):
        body = CHAT.ask("Find the callers.")
        answer = house.post(CHAT.path, body).json()
        work = CHAT.ask(PROMPT)
        house.post(CHAT.path, CHAT.follow(work, house.post(CHAT.path, work).json(), "Sure?"))
        house.post(CHAT.path, CHAT.follow(body, answer, "none"))
    main, first, second, last = house.calls()
    assert [row["kind"] for row in (main, first, second, last)] == ["agent", "subagent", "subagent", "agent"]
    assert [row["kind_evidence"] for row in (first, second)] == ["prompt", "tree"]
    assert [row["thread_id"] for row in (main, last)] == [None, None]
    assert [row["thread_id"] for row in (first, second)] == [first["call_id"]] * 2
