"""Negative controls: a history that the harness did not live through must fork, and the model must see it as sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module", params=PERFORMERS, ids="-".join)
def replayed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Replayed]:
    """After a task of three turns: its third request as it was, with an edited tool result, and without a turn."""
    changes: dict[str, Callable[[Json], Json]] = {
        "unchanged": lambda body: body,
        "edited": lambda body: with_edited_output(body, 0, EDIT),
        "deleted": lambda body: without_turn(body, 0),
    }
    harness, provider = request.param
    folder: Path = tmp_path_factory.mktemp("run")
    with interception(folder, script(harness, shell_calls=2)) as bench, bench.proxy():
        done = bench.perform(harness, provider, TASK, session=SESSION)
        rows = completed(bench.run)
        assert len(rows) == 3, done.output
        body = request_body(rows, rows[-1]["call_id"])
        return {name: _replay(bench, rows[-1], change(body)) for name, change in changes.items()}


def _replay(bench: Interception, row: Json, body: Json) -> Replayed:
    url = f"https://{row['host']}{row['path']}"
    answer = bench.ask(url, session=SESSION, body=body, headers={"user-agent": row["user_agent"]})
    assert answer.status_code == 200, answer.text
    return Replayed(completed(bench.run)[-1], bench.engine.decode(bench.engine.calls[-1].prompt_ids))


def test_the_unchanged_history_has_its_parent(replayed: dict[str, Replayed]):
    """The control of the controls: the same request again continues the second call."""
    assert replayed["unchanged"].row["parent_call_id"]
    assert output(0) in replayed["unchanged"].prompt


def test_an_edited_tool_result_forks_and_is_seen(replayed: dict[str, Replayed]):
    """With another tool result the call is a root, and the prompt holds the edit, not what was there."""
    edited = replayed["edited"]
    assert (edited.row["parent_call_id"], edited.row["root_reason"]) == (None, "edited_history")
    assert EDIT in edited.prompt
    assert output(0) not in edited.prompt


def test_a_deleted_turn_forks_and_is_gone(replayed: dict[str, Replayed]):
    """With a turn taken out the call is a root, and the prompt holds the later turn only."""
    deleted = replayed["deleted"]
    assert (deleted.row["parent_call_id"], deleted.row["root_reason"]) == (None, "edited_history")
    assert output(0) not in deleted.prompt
    assert output(1) in deleted.prompt
