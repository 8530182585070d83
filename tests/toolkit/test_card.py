"""The dataset card."""

import re

import pytest
import yaml

from polar_toolkit import batches, card, merge, packed, rewards, trajectories


def figures(text):
    """The tables of a card as one mapping."""
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE))


@pytest.fixture
def merged_folder(book, tmp_path):
    """A retry, a title and a reward for one of two sessions."""
    for name in ("one", "two"):
        book.call(f"{name}-a", [1, 2], [3], session_id=name, group_id="g")
        book.call(f"{name}-b", [1, 2, 3, 4], [5, 6], parent=f"{name}-a", session_id=name, group_id="g")
    book.call("title", [9], [8, 8], kind="auxiliary", session_id="one")
    run = book.write(tmp_path / "r")
    rewards.append(run, {"one": 1.0})
    options = merge.Options(batch=batches.Options(max_tokens=5))
    merge.merge(run, run / "merged", options, lambda *_: None)
    return run / "merged"


def test_the_cards_figures_are_the_reports(merged_folder):
    """Sampled, trained and each reason; edges, kinds, groups, filters and options."""
    shown = figures((merged_folder / "README.md").read_text())
    expected = {
        "sampled": 8, "trained": 6, "two owners": 0, "not trained: auxiliary": 2, "sessions": 2, "calls": 5,
        "calls by kind: agent": 4, "calls not trained: auxiliary": 1, "edges: exact": 2, "edges: root": 3,
        "trajectories": 2, "tokens of trajectories": 12, "tokens of weight version: v0": 8,
        "option: delivered_only": False, "option: max_tokens": 5, "option: advantage": "grpo", "rows": 1,
        "tokens trained": 2, "tokens left out: no_reward": 3, "tokens left out: truncated": 1, "groups": 1,
        "groups of equal rewards": 1, "sessions with a reward": 1,
    }  # fmt: skip
    assert {name: shown.get(name) for name in expected} == {name: str(value) for name, value in expected.items()}


def test_every_column_is_explained(merged_folder):
    """Of trajectories and of batches."""
    shown = figures((merged_folder / "README.md").read_text())
    assert {*trajectories.SCHEMA.names, *packed.SCHEMA.names} <= shown.keys()


def test_the_card_warns_that_prompts_are_data(merged_folder):
    """Behind a YAML head with the files."""
    _, head, text = (merged_folder / "README.md").read_text().split("---\n", 2)
    values = yaml.safe_load(head)
    assert values["pretty_name"] == "polar-mitm: r"
    assert [config["data_files"] for config in values["configs"]] == ["trajectories/*.parquet", "batches/*.parquet"]
    assert "Prompts are data" in text


def test_names_cannot_break_a_table(merged_folder):
    """A version is named by whoever runs the engine."""
    report = merge.merged.read_report(merged_folder) | {"weight_versions": {"a|b\nc": 1}}
    assert "| tokens of weight version: a\\|b c | 1 |" in card.text(report)
