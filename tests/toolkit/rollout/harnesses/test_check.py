"""`harness check` runs a harness as a rollout would and sees what it did."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.rollout import recipe
from polar_toolkit.rollout.harnesses.check import TASK, Asked, look, script, tokenizer_folder
from polar_toolkit.rollout.harnesses.findings import Finding, findings
from tests.bench.provisions import HARNESS_BIN, qwen3_tokenizer

QUICK = ["codex", "claude-code", "pi", "mini-swe-agent"]
SLOW = ["qwen-code", "gemini-cli", "opencode"]
HARNESSES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INSTALLED = HARNESS_BIN.parents[1]
Lines = dict[str, Finding]
Check = Callable[..., Lines]

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Generator[Check]:
    """Check a harness in a local sandbox, with the installed harnesses on PATH; gives the findings by their names."""

    def checked(name: str, command: str = "") -> Lines:
        found = recipe.find(name)
        asked = Asked(found, found.way(), qwen3_tokenizer(), command=command)
        return {line.what: line for line in findings(asked, look(asked, tmp_path_factory.mktemp("check") / "run"))}

    mini = INSTALLED / "mini-swe-agent" / "bin"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{HARNESS_BIN}:{mini}:/usr/local/bin:/usr/bin:/bin")
        yield checked


@pytest.fixture
def tiny() -> Generator[Path]:
    """The folder that harness_images/README.md tells its reader to write; not in /tmp, which is the sandbox's own."""
    blocks = dict(BLOCKS.findall((recipe.IMAGES / "README.md").read_text()))
    with tempfile.TemporaryDirectory(dir=INSTALLED) as folder:
        Path(folder).chmod(0o755)  # inside, it is another user who reads it
        (Path(folder) / "harness.toml").write_text(blocks["toml"])
        (Path(folder) / "tiny-agent").write_text(blocks["python"])
        (Path(folder) / "tiny-agent").chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def idle(check: Check) -> Lines:
    """What is said of a harness that asks for a name, makes no call, and ends with status 0."""
    return check("shell", "getent hosts updates.example.test; true")


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_of_the_project_passes(check: Check, name: str):
    """It runs its tool, ends with the closing text, and every token of its agent is trained; nothing is missing."""
    seen = check(name)
    assert [line for line in seen.values() if line.mark == "missing"] == []
    assert seen["version"].seen == recipe.find(name).version
    assert seen["tool call"].seen == "executed"
    assert seen["trained"].seen.startswith("100.0%")
    assert "exact 1" in seen["edges"].seen


def test_the_worked_example_of_the_readme_passes(check: Check, tiny: Path):
    """A harness is added by writing one folder, word for word as the page says."""
    seen = check(str(tiny))
    assert {name: line.seen for name, line in seen.items() if line.mark != "good"} == {}
    assert seen["calls"].seen == "agent 2"


def test_a_command_of_the_users_own_is_a_harness(check: Check, tiny: Path):
    """The harness `shell` runs it with the instruction; without a known tool only its calls and its end are judged."""
    agent = (tiny / "tiny-agent").read_text()
    seen = check("shell", f'cat > agent.py <<"END"\n{agent}END\nexec python3 agent.py {{task}}')
    assert (seen["calls"].seen, seen["final text"].seen) == ("agent 1", "printed")
    assert [line.what for line in seen.values() if line.mark == "missing"] == []


def test_a_harness_that_asks_nothing_is_missing_its_calls(idle: Lines):
    """Exit status 0 says nothing: calls, closing text and trained tokens are missing."""
    assert {line.what for line in idle.values() if line.mark == "missing"} == {"calls", "final text", "trained"}
    assert idle["exit status"].seen == "0"


def test_a_name_that_is_not_known_inside_is_told(idle: Lines):
    """What a harness asks for in vain is counted, and the remedy stands beside it."""
    assert "updates.example.test" in idle["refused names"].seen
    assert "`names`" in idle["refused names"].hint


def test_a_small_call_beside_the_agents_gets_the_answer_of_the_recipe():
    """A prompt without tools is no place for a tool call."""
    act = script(recipe.find("gemini-cli"))
    assert act("a prompt about complexity_score") == recipe.find("gemini-cli").replies["complexity_score"]
    assert "<tool_call>" not in act(TASK)


def test_a_tokenizer_of_another_family_is_refused(tmp_path: Path):
    """The script's turns are told by the marks of the Qwen family."""
    with pytest.raises(Refusal, match=r"holds no tokenizer\.json: run `polar-train fetch qwen3-tokenizer`"):
        tokenizer_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Refusal, match="does not know"):
        tokenizer_folder(tmp_path)
