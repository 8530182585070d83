"""Whose call it is and the ids that harnesses must echo: minted ids, the key, sessions."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar_mitm.errors import Unauthorized
from polar_mitm.identity import (
    DEFAULT_SESSION,
    Session,
    Sessions,
    figures_token,
    load_key,
    mint,
    new_call_id,
    read_pointer,
    register,
    seal,
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


def test_a_session_is_registered_with_its_terms(tmp_path: Path) -> None:
    """Budget and hosts; a budget of nothing is one."""
    secret = register(tmp_path, "a", "g", turns=0, tokens=1000, allow_hosts=["*.example.org"])
    assert Sessions(tmp_path).identify("a", secret) == Session(
        "a", "g", registered=True, turns=0, tokens=1000, allow_hosts=("*.example.org",)
    )


def test_a_sealed_session_is_told_as_over(tmp_path: Path) -> None:
    """At the next look-up, and by a process that starts later; sealing again changes nothing."""
    secret, sessions = register(tmp_path, "a"), Sessions(tmp_path)
    assert not sessions.identify("a", secret).sealed
    for _ in range(2):
        seal(tmp_path, "a")
    assert sessions.identify("a", secret).sealed
    assert Sessions(tmp_path).identify("a", secret).sealed
    assert len((tmp_path / "sessions.jsonl").read_text().splitlines()) == 2


def test_only_a_registered_session_can_be_sealed(tmp_path: Path) -> None:
    """The message names it."""
    with pytest.raises(ValueError, match="'a' is not registered"):
        seal(tmp_path, "a")


def test_a_torn_line_is_no_line(tmp_path: Path) -> None:
    """What a killed writer left half is ignored, also once another has written behind it."""
    register(tmp_path, "a")
    with (tmp_path / "sessions.jsonl").open("ab") as file:
        file.write(b'{"session_id": "torn", "secr')
    sessions = Sessions(tmp_path)
    assert not sessions.registered("torn")
    secret = register(tmp_path, "b")
    assert sessions.identify("b", secret).session_id == "b"
    assert not sessions.registered("torn")


def test_a_line_counts_when_it_is_complete(tmp_path: Path) -> None:
    """A reader that came in the middle reads the whole line the next time."""
    register(tmp_path, "a")
    whole = (tmp_path / "sessions.jsonl").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    (other / "sessions.jsonl").write_bytes(whole[:20])
    sessions = Sessions(other)
    assert not sessions.registered("a")
    with (other / "sessions.jsonl").open("ab") as file:
        file.write(whole[20:])
    assert sessions.registered("a")


def test_a_run_that_is_made_anew_has_new_sessions(tmp_path: Path) -> None:
    """A file that is another one, or shorter, is read from its beginning."""
    for name in ("a", "c"):
        register(tmp_path, name)
    sessions = Sessions(tmp_path)
    assert sessions.registered("a")
    (tmp_path / "sessions.jsonl").unlink()
    register(tmp_path, "b")
    assert (sessions.registered("a"), sessions.registered("b")) == (False, True)


def test_a_session_is_known_by_where_it_comes_from(tmp_path: Path) -> None:
    """The proxy mode or the address that it was registered with; the first of several."""
    register(tmp_path, "m", mode="regular@8081")
    register(tmp_path, "x", address="10.0.0.2")
    register(tmp_path, "y", address="10.0.0.2")
    sessions = Sessions(tmp_path)
    assert sessions.identify(None, None, mode="regular@8081", address="10.0.0.9").session_id == "m"
    assert sessions.identify(None, None, mode="regular", address="10.0.0.2").session_id == "x"


def test_the_token_of_the_figures_is_the_runs_own() -> None:
    """Made of the key; the key is not in it."""
    assert figures_token(KEY) != figures_token(OTHER_KEY)
    assert KEY.hex() not in figures_token(KEY)
