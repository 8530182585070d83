"""What `polar-toolkit verify` says of a template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar_mitm.tokens import Template
from polar_toolkit import verify
from polar_toolkit.cli import app
from polar_toolkit.errors import Refusal
from tests.bench.provisions import qwen3_tokenizer
from tests.mitm.tokens.chatml import CHATML, COUNTING, byte_tokenizer


@pytest.fixture(scope="module")
def qwen3() -> verify.Report:
    return verify.verify(qwen3_tokenizer())


def test_a_family_is_told_with_its_bridge_and_its_ends(qwen3: verify.Report) -> None:
    """What a user wants to know first."""
    assert (qwen3.family, qwen3.bridge, qwen3.reads_calls) == ("qwen3", "typed", True)
    assert set(qwen3.stops.values()) == {"<|im_end|>", "<|endoftext|>"}


def test_every_bridged_prompt_of_qwen3_is_faithful(qwen3: verify.Report) -> None:
    """And all but the drift of reasoning and white space is the canonical render, id by id."""
    assert qwen3.faithful
    drifts = {seen.step: seen.drift for seen in qwen3.steps if seen.outcome != "equal"}
    assert drifts == {
        "reasoning and text, then a user": "reasoning",
        "text long after reasoning": "reasoning",
        "white space around the reply": "retokenized",
    }
    assert qwen3.append_only == (17, 20)


def test_a_drift_is_shown_where_it_begins(qwen3: verify.Report) -> None:
    """What was sampled, and what a render would put there."""
    seen = next(s for s in qwen3.steps if s.drift == "reasoning")
    assert "Hm, folders." in seen.sampled
    assert "Hm, folders." not in seen.rendered


def test_an_unknown_template_says_which_path_is_used() -> None:
    """No typed renderer, texts are extended, calls are not."""
    report = verify.examine(Template(byte_tokenizer(CHATML)))
    assert (report.family, report.bridge, report.reads_calls) == ("template", "difference, texts only", False)
    assert "calls reach the harness as text" in verify.summary(report)
    assert "says no tool calls" in report.against


def test_a_template_without_a_bridge_is_faithful_and_says_so() -> None:
    """Every prompt is a full render, which is the template's own."""
    report = verify.examine(Template(byte_tokenizer(COUNTING)))
    assert (report.family, report.bridge, report.faithful) == ("none", "none", True)
    assert {seen.outcome for seen in report.steps} == {"no bridge", "not taken"}


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """In one sentence, with exit code 2."""
    done = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds no tokenizer" in done.output


def test_another_family_than_the_one_that_is_asked_for_is_refused(bytes_folder: Path) -> None:
    """With the reason why it is not that one; a name that is none lists them all."""
    with pytest.raises(Refusal, match="not spoken by 'qwen3'"):
        verify.verify(bytes_folder, "qwen3")
    with pytest.raises(Refusal, match=r"none of .*qwen3"):
        verify.verify(bytes_folder, "qwen-three")


def test_the_command_prints_a_table_or_json(bytes_folder: Path) -> None:
    """Both from one report."""
    table = CliRunner().invoke(app, ["verify", str(bytes_folder)])
    assert table.exit_code == 0
    assert "every bridged prompt is faithful" in table.output
    told = json.loads(CliRunner().invoke(app, ["verify", str(bytes_folder), "--json"]).output)
    assert told["faithful"] is True
    assert told["bridge"] == "difference, texts only"


def test_an_unfaithful_step_fails_the_check() -> None:
    """The command's exit code is 1."""
    report = verify.examine(Template(byte_tokenizer(CHATML)))
    broken = replace(report, steps=(verify.Seen("a step", "unfaithful"),))
    assert not broken.faithful
    assert "NOT FAITHFUL" in verify.summary(broken)


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of one id for each byte."""
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer().save_pretrained(str(folder))
    return folder
