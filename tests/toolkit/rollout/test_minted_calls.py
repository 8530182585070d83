"""An agent that calls the provider's address from its own shell mints nothing that is trained.

The calls of a real Pi in a local sandbox are its own; what its shell sends over the sandbox's connection is recorded,
and told from them.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from polar_mitm.journal import read_calls
from polar_toolkit.cli import app
from polar_toolkit.rollout.harnesses.scripted_engine import ScriptedEngine
from polar_toolkit.rollout.options import Options, Pools
from polar_toolkit.rollout.task import Budget, Check, Task
from tests.bench.census import nothing_left
from tests.bench.provisions import harness_binary, qwen3_tokenizer
from tests.bench.rolling import rolled
from tests.harness.performance import Json, turn

pytestmark = pytest.mark.harness

URL = "https://api.openai.com/v1/responses"
MINTED = "Say that all is well"
BODY = json.dumps({"model": "gpt-5.2", "input": MINTED})
PYTHON = f"""python3 - <<'END'
from urllib.request import Request, urlopen
urlopen(Request("{URL}", {BODY.encode()!r}, {{"content-type": "application/json"}})).read()
END"""
FORGED = "pi/1.6.0 (linux; node/v24.22.3; x64)"
SHELL = {
    "curl": f"curl -sS {URL} -H 'content-type: application/json' -d '{BODY}'",
    "urllib": PYTHON,
    "forged": f"curl -sS {URL} -H 'content-type: application/json' -A '{FORGED}' -d '{BODY}'",
}


TASKS = [
    Task(name, f"Look around, {name}.", Check("command", {"command": "true"}), budget=Budget(60, 90, 30))
    for name in SHELL
]


@dataclass(frozen=True, slots=True)
class Minted:
    """What became of a rollout whose shells minted calls."""

    calls: list[Json]
    """Completed ones."""
    trajectories: list[Json]

    def of(self, name: str) -> tuple[list[Json], list[Json]]:
        """The calls of a session: the agent's, and the others."""
        calls = [row for row in self.calls if row["session_id"] == f"{name}.1"]
        return [row for row in calls if row["kind"] == "agent"], [row for row in calls if row["kind"] != "agent"]


def play(prompt: str) -> str:
    """Pi's part: one shell command, then the end; and an answer to whoever else asks."""
    name = next((name for name in SHELL if f"Look around, {name}." in prompt), None)
    if name is None:
        return "All is well, and I deserve a reward."
    call = json.dumps({"name": "bash", "arguments": {"command": SHELL[name]}})
    return [f"I look.\n\n<tool_call>\n{call}\n</tool_call>", "Nothing to do."][min(turn(prompt), 1)]


@pytest.fixture(scope="module")
def minted(tmp_path_factory: pytest.TempPathFactory) -> Minted:
    folder = tmp_path_factory.mktemp("minted")
    with (
        ScriptedEngine(qwen3_tokenizer(), play).serving() as engine,
        pytest.MonkeyPatch.context() as environment,
        nothing_left(folder),
    ):
        environment.setenv("PATH", f"{harness_binary('pi').parent}:{os.environ['PATH']}")
        asked = Options(
            folder / "run", "pi", engine.url, way="openai", tokenizer=str(qwen3_tokenizer()), samples=1, tries=1,
            pools=Pools(init=2, ready=4, run=4, post=2),
        )  # fmt: skip
        asyncio.run(rolled(asked, TASKS))
    merged = CliRunner().invoke(app, ["merge", str(asked.run)])
    assert merged.exit_code == 0, merged.output
    calls = [row for row in read_calls(asked.run).to_pylist() if row["status"] == "completed"]
    return Minted(calls, pq.read_table(asked.run / "merged" / "trajectories").to_pylist())


@pytest.mark.parametrize(("name", "kind"), [("curl", "foreign"), ("urllib", "foreign"), ("forged", "auxiliary")])
def test_a_call_from_the_agents_shell_is_recorded_as_no_agents_call(minted: Minted, name: str, kind: str):
    """It is answered and on record; another program is foreign, one that calls itself Pi has none of Pi's tools."""
    own, others = minted.of(name)
    assert len(own) == 2
    assert [row["kind"] for row in others] == [kind]
    assert MINTED in others[0]["request"]


@pytest.mark.parametrize("name", SHELL)
def test_no_token_of_it_is_trained(minted: Minted, name: str):
    """The trained tokens are those that Pi's own calls sampled, to the last one."""
    own, _ = minted.of(name)
    rows = [row for row in minted.trajectories if row["session_id"] == f"{name}.1"]
    assert sum(sum(row["loss_mask"]) for row in rows) == sum(len(row["output_ids"]) for row in own)
