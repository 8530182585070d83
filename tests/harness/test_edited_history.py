"""Negative controls: a history that the harness did not live through must fork, and the model must see it as sent.

What is sent is a real harness's own last request, changed in one place: a request that comes again, an edited tool
result, a turn taken out, another tool, ids that nobody minted, and another session.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from polar_toolkit.merge import Options, account
from tests.bench.interception import Interception, interception
from tests.harness.performance import (
    PERFORMERS,
    SESSION,
    TASK,
    Json,
    completed,
    output,
    request_body,
    script,
    with_edited_output,
    without_turn,
)

pytestmark = pytest.mark.harness

EDIT = "wrote something else entirely"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of the harness's last request, sent again."""

    row: Json
    prompt: str
    """The text that the engine received."""

    @property
    def window(self) -> Json:
        """How a root leaves the nearest earlier call."""
        return json.loads(self.row["root_window"])


@dataclass(frozen=True, slots=True)
class Controls:
    """A harness's task and the replays of its last request."""

    rows: list[Json]
    """The calls of the harness itself."""
    replayed: dict[str, Replayed]
    report: Json
    """What the merge says of them all."""


CHANGES: dict[str, Callable[[Json], Json]] = {
    "unchanged": lambda body: body,
    "edited": lambda body: with_edited_output(body, 0, EDIT),
    "deleted": lambda body: without_turn(body, 0),
    "tools": lambda body: with_other_tool(body),
    "forged": lambda body: with_forged_ids(body),
}


@pytest.fixture(scope="module", params=PERFORMERS, ids="-".join)
def controls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Controls:
    """After a task of three turns: its third request as it was, changed in each way, and from another session."""
    harness, provider = request.param
    folder: Path = tmp_path_factory.mktemp("run")
    with interception(folder, script(harness, shell_calls=2)) as bench, bench.proxy():
        done = bench.perform(harness, provider, TASK, session=SESSION)
        rows = completed(bench.run)
        assert len(rows) == 3, done.output
        body = request_body(rows, rows[-1]["call_id"])
        replayed = {name: _replay(bench, rows[-1], change(body)) for name, change in CHANGES.items()}
        replayed["stranger"] = _replay(bench, rows[-1], body, session="s2")
        return Controls(rows, replayed, account(bench.run, Options(workers=1), lambda *_: None)[1])


def _replay(bench: Interception, row: Json, body: Json, session: str = SESSION) -> Replayed:
    url = f"https://{row['host']}{row['path']}"
    answer = bench.ask(url, session=session, body=body, headers={"user-agent": row["user_agent"]})
    assert answer.status_code == 200, answer.text
    return Replayed(completed(bench.run)[-1], bench.engine.decode(bench.engine.calls[-1].prompt_ids))


def with_other_tool(body: Json) -> Json:
    """The same request, but its first tool says of itself something else."""
    first, *rest = body["tools"]
    described = first.get("function", first)
    changed = described | {"description": "Does something else."}
    return body | {"tools": [first | {"function": changed} if "function" in first else changed, *rest]}


def with_forged_ids(body: Json) -> Json:
    """The same request, but every id of ours in it bears a wrong signature."""
    forged, count = re.subn(r"([a-z2-7]{20}[0-9a-f]{2})[a-z2-7]{8}", r"\1aaaaaaaa", json.dumps(body))
    assert count
    return json.loads(forged)


def test_the_unchanged_history_has_its_parent(controls: Controls):
    """The control of the controls: the same request again continues the second call, by its pointer."""
    again = controls.replayed["unchanged"]
    assert again.row["parent_call_id"] == controls.rows[1]["call_id"]
    assert again.row["parent_evidence"] == "pointer"
    assert output(0) in again.prompt


def test_an_edited_tool_result_forks_and_is_seen(controls: Controls):
    """With another tool result the call is a root, and the prompt holds the edit, not what was there."""
    edited = controls.replayed["edited"]
    assert (edited.row["parent_call_id"], edited.row["root_reason"]) == (None, "edited_history")
    assert EDIT in edited.prompt
    assert output(0) not in edited.prompt
    assert edited.window["class"] == "edited"
    assert EDIT in edited.window["now"]
    assert EDIT not in edited.window["was"]


def test_a_deleted_turn_forks_and_is_gone(controls: Controls):
    """With a turn taken out the call is a root, and the prompt holds the later turn only."""
    deleted = controls.replayed["deleted"]
    assert (deleted.row["parent_call_id"], deleted.row["root_reason"]) == (None, "edited_history")
    assert output(0) not in deleted.prompt
    assert output(1) in deleted.prompt
    assert deleted.window["class"] == "removed"


def test_another_tool_forks_and_is_seen(controls: Controls):
    """With a tool that says something else of itself the call is a root, and the prompt holds the new words."""
    changed = controls.replayed["tools"]
    assert (changed.row["parent_call_id"], changed.row["root_reason"]) == (None, "tools_changed")
    assert "Does something else." in changed.prompt
    assert changed.window["class"] == "tools"


def test_a_forged_id_is_not_believed(controls: Controls):
    """Ids with a wrong signature name nothing: what is left is the history, and it shows the parent by itself."""
    forged = controls.replayed["forged"]
    assert forged.row["parent_call_id"] == controls.rows[1]["call_id"]
    assert forged.row["parent_evidence"] == "history"


def test_the_ids_of_another_session_are_not_believed(controls: Controls):
    """The same request from a second session is that session's root: nothing of the first is reached through it."""
    stranger = controls.replayed["stranger"]
    assert (stranger.row["session_id"], stranger.row["parent_call_id"]) == ("s2", None)
    assert stranger.row["root_reason"] == "unknown_history"


def test_what_was_asked_again_is_trained_once(controls: Controls):
    """Of three calls with one prompt, which nothing goes on from, one is trained; the others are superseded."""
    assert controls.report["calls_not_trained"]["superseded"] == 2
    assert controls.report["tokens"]["not_trained"].keys() == {"superseded"}


def test_every_control_leaves_the_path(controls: Controls):
    """No control goes on from a whole reply: it is a root, or a branch inside a reply whose beginning it repeats."""
    reasons = {"first": 1, "edited_history": 2, "tools_changed": 1, "unknown_history": 1}
    assert controls.report["root_reasons"] == reasons
    edges = controls.report["edges"]
    refused = controls.report["calls"]["by_status"].get("refused", 0)  # Pi 1.6.0 asks Anthropic for a thread first
    assert edges["root"] - refused + edges["inside"] == sum(reasons.values())
    assert edges["exact"] == 4  # the harness's own two, and the two that were asked again
