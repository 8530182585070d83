"""Whose call it is and which call it continues: minted ids, sessions, fingerprints, tips."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.conversation import Conversation, Message, Text, Tool, ToolCall, ToolResult, history_keys, tools_key
from polar_mitm.errors import Unauthorized
from polar_mitm.identity import (
    DEFAULT_SESSION,
    Fingerprints,
    Parent,
    Session,
    Sessions,
    Tip,
    Tips,
    load_key,
    mint,
    new_call_id,
    read_pointer,
    register,
)

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
CALL_ID = "abcdefghij234567klmn"
CORE = mint(KEY, "s", CALL_ID, 2)
_IDS = st.text("abcdefghijklmnopqrstuvwxyz234567", min_size=20, max_size=20)


# --- minted ids ---------------------------------------------------------------------------------------------------


@given(session=st.text(max_size=30), call_id=_IDS, choice=st.integers(0, 255))
def test_a_minted_id_is_read_back(session: str, call_id: str, choice: int) -> None:
    """Session, call and choice come back from the 30 characters of an id's core."""
    core = mint(KEY, session, call_id, choice)
    assert len(core) == 30
    assert read_pointer(KEY, session, core) == (call_id, choice)


@given(prefix=st.sampled_from(["call_", "toolu_", "run_shell_command__", "msg-"]), suffix=st.sampled_from(["", "00"]))
def test_a_minted_id_is_found_inside_another(prefix: str, suffix: str) -> None:
    """Gemini CLI puts the tool's name before the id, our own answers a prefix and the place of the call."""
    assert read_pointer(KEY, "s", f"{prefix}{CORE}{suffix}") == (CALL_ID, 2)


@pytest.mark.parametrize(
    ("key", "session", "text"),
    [
        pytest.param(KEY, "s", CORE[:-1] + ("a" if CORE[-1] != "a" else "b"), id="a forged MAC"),
        pytest.param(KEY, "s", "b" + CORE[1:], id="another call under the same MAC"),
        pytest.param(KEY, "s", CORE[:20] + "03" + CORE[22:], id="another choice under the same MAC"),
        pytest.param(KEY, "t", CORE, id="another session"),
        pytest.param(OTHER_KEY, "s", CORE, id="another run's key"),
        pytest.param(KEY, "s", CORE[:-1], id="a shortened id"),
        pytest.param(KEY, "s", CORE.upper(), id="another case"),
    ],
)
def test_an_id_that_is_not_ours_points_nowhere(key: bytes, session: str, text: str) -> None:
    """Only the very id, in its own session and run, is a pointer."""
    assert read_pointer(key, session, text) is None


@given(st.text() | st.from_regex(r"[a-z2-7]{20}[0-9a-f]{2}[a-z2-7]{8}"))
def test_any_text_is_read_without_an_error(text: str) -> None:
    """Harnesses send ids of their own and tools print what they like: None, never an exception."""
    assert read_pointer(KEY, "s", text) is None


def test_call_ids_differ() -> None:
    """Ids are drawn, not counted: a restart cannot repeat one."""
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(i) for i in ids} == {20}


def test_the_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    """32 bytes, mode 0600, the same after a restart."""
    key = load_key(tmp_path)
    assert len(key) == 32
    assert load_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


# --- sessions -----------------------------------------------------------------------------------------------------


def test_registering_again_gives_the_same_secret(tmp_path: Path) -> None:
    """A runner that starts again finds its sessions."""
    assert register(tmp_path, "a", "g") == register(tmp_path, "a", "g")
    assert len((tmp_path / "sessions.jsonl").read_text().splitlines()) == 1


def test_each_session_has_its_own_secret(tmp_path: Path) -> None:
    """One agent cannot speak for another."""
    assert register(tmp_path, "a") != register(tmp_path, "b")


def test_the_sessions_file_is_private(tmp_path: Path) -> None:
    """It holds the secrets: mode 0600."""
    register(tmp_path, "a")
    assert stat.S_IMODE((tmp_path / "sessions.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a@b", "a/b", "ä", "a\n", "x" * 101])
def test_a_name_that_cannot_stand_in_a_proxy_url_is_refused(tmp_path: Path, name: str) -> None:
    """The session's name is the user of http://NAME:SECRET@host:port."""
    with pytest.raises(ValueError, match="session name"):
        register(tmp_path, name)


def test_a_session_cannot_change_its_group(tmp_path: Path) -> None:
    """The message names the group that it is in."""
    register(tmp_path, "a", "g")
    with pytest.raises(ValueError, match="'g', not 'h'"):
        register(tmp_path, "a", "h")


@pytest.mark.parametrize(("name", "session"), [(None, DEFAULT_SESSION), ("", DEFAULT_SESSION), ("mine", "mine")])
def test_a_run_without_registered_sessions_takes_any_name(tmp_path: Path, name: str | None, session: str) -> None:
    """An interactive run asks for no registration."""
    assert Sessions(tmp_path).identify(name, "whatever") == Session(session)


def test_a_registered_session_is_told_with_its_group(tmp_path: Path) -> None:
    """Name and secret together are the session."""
    secret = register(tmp_path, "a", "g")
    assert Sessions(tmp_path).identify("a", secret) == Session("a", "g", registered=True)


@pytest.mark.parametrize(("name", "secret"), [("a", "wrong"), ("a", None), ("b", None), (None, None), ("a", "é")])
def test_once_sessions_are_registered_nobody_else_is_let_in(
    tmp_path: Path, name: str | None, secret: str | None
) -> None:
    """A wrong secret, an unknown name and no name at all are refused."""
    register(tmp_path, "a")
    with pytest.raises(Unauthorized, match="polar-toolkit env"):
        Sessions(tmp_path).identify(name, secret)


def test_a_registration_by_another_process_is_seen(tmp_path: Path) -> None:
    """The runner registers while the proxy runs."""
    sessions = Sessions(tmp_path)
    sessions.identify(None, None)
    secret = register(tmp_path, "late")
    assert sessions.identify("late", secret) == Session("late", registered=True)


# --- kinds --------------------------------------------------------------------------------------------------------


KNOWN = Session("s", registered=True)


def test_an_interactive_session_takes_any_harness() -> None:
    """Its user may run one harness after the other."""
    prints, mine = Fingerprints(), Session(DEFAULT_SESSION)
    assert [prints.kind(mine, {"user-agent": agent}) for agent in ("pi/1.6.0", "codex_exec/0.171.0")] == [
        "agent",
        "agent",
    ]


def test_a_shell_that_uses_the_sessions_credentials_is_foreign() -> None:
    """The agent's shell inherits the proxy address: curl in a session of Claude Code is not its model call."""
    prints = Fingerprints()
    assert prints.kind(KNOWN, {"user-agent": "claude-cli/2.1.332 (external, cli)"}) == "agent"
    assert prints.kind(KNOWN, {"user-agent": "curl/8.5.0"}) == "foreign"
    assert prints.kind(KNOWN, {}) == "foreign"


def test_another_version_of_the_same_harness_is_not_foreign() -> None:
    """The product is compared, without its version."""
    prints = Fingerprints()
    kinds = [prints.kind(KNOWN, {"user-agent": agent}) for agent in ("codex_exec/0.171.0", "codex_exec/0.172.0 (x)")]
    assert kinds == ["agent", "agent"]


def test_each_session_has_its_own_fingerprint() -> None:
    """The first caller of a session is its harness."""
    prints = Fingerprints()
    assert [prints.kind(Session(s, registered=True), {"user-agent": a}) for s, a in (("s", "a/1"), ("t", "b/1"))] == [
        "agent",
        "agent",
    ]


@pytest.mark.parametrize(
    ("header", "value", "kind"),
    [
        ("x-claude-code-agent-id", "a1", "subagent"),
        ("x-claude-code-request-class", "compaction", "compaction"),
        ("x-claude-code-request-class", "main", "agent"),
    ],
)
def test_claude_code_says_what_kind_a_call_is(header: str, value: str, kind: str) -> None:
    """Sub-agents and compactions are told by Claude Code's own headers."""
    assert Fingerprints().kind(KNOWN, {"user-agent": "claude-cli/2", header: value}) == kind


# --- parents ------------------------------------------------------------------------------------------------------

TOOLS = (Tool("run", "runs", "{}"),)
ASKED = Message("user", (Text("Look."),))
REPLIED = Message("assistant", (ToolCall("call_1", "run", "{}"),))
RESULT = Message("tool", (ToolResult("call_1", "a.txt\n"),))
ANSWERED = Message("assistant", (Text("There is a.txt."),))
MORE = Message("user", (Text("Thanks."),))


def tip(call_id: str, *history: Message, tools: tuple[Tool, ...] = TOOLS, tokens: int = 10) -> Tip:
    """A finished call with this history, reply included."""
    half = np.zeros(tokens // 2, np.int32)
    return Tip(call_id, 0, half, half, history_keys(history)[-1], tools_key(tools))


def request(*history: Message, tools: tuple[Tool, ...] = TOOLS) -> Conversation:
    return Conversation("m", history, tools)


def tips(*finished: Tip) -> Tips:
    known = Tips()
    for each in finished:
        known.add("s", each)
    return known


def test_a_request_that_names_its_parent_is_attached_by_pointer() -> None:
    """The echoed id says which call, the history agrees."""
    first = tip("one", ASKED, REPLIED)
    found = tips(first).find("s", request(ASKED, REPLIED, RESULT), [("one", 0)])
    assert found == Parent(first, "pointer", 2)


def test_a_request_without_an_id_is_attached_by_its_history() -> None:
    """Text-only turns carry no id in some protocols."""
    first = tip("one", ASKED, ANSWERED)
    assert tips(first).find("s", request(ASKED, ANSWERED, MORE), []) == Parent(first, "history", 2)


def test_the_deepest_call_is_the_parent() -> None:
    """A chain is extended at its end."""
    one, two = tip("one", ASKED, REPLIED), tip("two", ASKED, REPLIED, RESULT, ANSWERED)
    found = tips(one, two).find("s", request(ASKED, REPLIED, RESULT, ANSWERED, MORE), [("one", 0)])
    assert found == Parent(two, "history", 4)


@pytest.mark.parametrize("named", ["one", "two"])
def test_a_pointer_chooses_among_equal_siblings(named: str) -> None:
    """Two samples of one prompt said the same: the echoed id tells them apart."""
    siblings = tips(tip("one", ASKED, REPLIED), tip("two", ASKED, REPLIED))
    found = siblings.find("s", request(ASKED, REPLIED, RESULT), [(named, 0)])
    assert isinstance(found, Parent)
    assert found.tip.call_id == named


def test_without_a_pointer_the_latest_of_equal_siblings_is_taken() -> None:
    """A retry's answer is the one that the harness goes on from."""
    siblings = tips(tip("one", ASKED, REPLIED), tip("two", ASKED, REPLIED))
    found = siblings.find("s", request(ASKED, REPLIED, RESULT), [])
    assert isinstance(found, Parent)
    assert found.tip.call_id == "two"


def test_a_pointer_does_not_attach_an_edited_history() -> None:
    """An echoed id beside a changed history is a fork: the model must see the change."""
    known = tips(tip("one", ASKED, REPLIED))
    edited = Message("user", (Text("Look!"),))
    assert known.find("s", request(edited, REPLIED, RESULT), [("one", 0)]) == "edited_history"


def test_an_edited_tool_result_forks() -> None:
    """The chain up to the edit is known, what follows is another history."""
    known = tips(tip("one", ASKED, REPLIED), tip("two", ASKED, REPLIED, RESULT, ANSWERED))
    edited = Message("tool", (ToolResult("call_1", "b.txt\n"),))
    assert known.find("s", request(ASKED, REPLIED, edited, ANSWERED, MORE), []) == "edited_history"


def test_a_deleted_turn_forks() -> None:
    """The last reply is ours by its id, what stood before it is gone."""
    known = tips(tip("one", ASKED, REPLIED), tip("two", ASKED, REPLIED, RESULT, ANSWERED))
    assert known.find("s", request(ASKED, ANSWERED, MORE), [("two", 0)]) == "edited_history"


def test_a_change_of_the_tools_forks() -> None:
    """The tools stand at the head of the prompt."""
    known = tips(tip("one", ASKED, REPLIED))
    assert known.find("s", request(ASKED, REPLIED, RESULT, tools=()), [("one", 0)]) == "tools_changed"


def test_a_history_that_nobody_saw_is_a_root() -> None:
    """A conversation that began elsewhere has no parent here."""
    assert tips().find("s", request(ASKED, REPLIED, RESULT), []) == "unknown_history"


def test_another_sessions_call_is_no_parent() -> None:
    """Sessions do not share calls, not even equal ones."""
    known = tips(tip("one", ASKED, REPLIED))
    assert known.find("t", request(ASKED, REPLIED, RESULT), [("one", 0)]) == "unknown_history"


def test_a_request_without_a_reply_in_it_is_the_first() -> None:
    """Nothing was sampled yet."""
    assert tips(tip("one", ASKED, REPLIED)).find("s", request(ASKED), []) == "first"


def test_two_requests_may_continue_one_call() -> None:
    """The second becomes a branch: finding a parent takes nothing away."""
    known = tips(tip("one", ASKED, REPLIED))
    found = [known.find("s", request(ASKED, REPLIED, RESULT), [("one", 0)]) for _ in range(2)]
    assert found[0] == found[1]


def test_the_oldest_calls_are_forgotten_beyond_the_bound() -> None:
    """The number of tokens held is bounded, the newest are kept."""
    known = Tips(max_tokens=25)
    for name in ("one", "two", "three"):
        known.add("s", tip(name, Message("user", (Text(name),)), REPLIED))
    assert [known.knows("s", name, 0) for name in ("one", "two", "three")] == [False, True, True]
    assert known.find("s", request(Message("user", (Text("one"),)), REPLIED), []) == "unknown_history"


def test_a_call_longer_than_the_bound_is_kept_while_it_is_the_newest() -> None:
    """A session of one huge context must still be extended."""
    known = Tips(max_tokens=5)
    known.add("s", tip("one", ASKED, REPLIED))
    assert known.knows("s", "one", 0)


def test_forgetting_one_of_equal_siblings_keeps_the_other() -> None:
    """Eviction takes the call, not its history."""
    known = Tips(max_tokens=15)
    for name in ("one", "two"):
        known.add("s", tip(name, ASKED, REPLIED))
    found = known.find("s", request(ASKED, REPLIED, RESULT), [("one", 0)])
    assert isinstance(found, Parent)
    assert (found.tip.call_id, found.evidence) == ("two", "history")


def test_adding_a_call_again_changes_nothing() -> None:
    """Calls reloaded from the journal may be in memory already."""
    known = Tips(max_tokens=25)
    for _ in range(5):
        known.add("s", tip("one", ASKED, REPLIED))
    known.add("s", tip("two", ASKED, ANSWERED))
    assert known.knows("s", "one", 0)
