"""What is read as a reward, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar_toolkit.rollout.evaluators import EvaluatorError, Verdict
from polar_toolkit.rollout.evaluators.script import finite, from_parts, reward_of, text_of


def test_a_folder_without_reward_files_says_nothing(tmp_path: Path) -> None:
    """Nor does an empty file."""
    (tmp_path / "reward.txt").touch()
    assert reward_of(tmp_path) is None


@pytest.mark.parametrize("text", ["good", "nan", "inf", "1e999", "1 2"])
def test_a_reward_txt_is_one_finite_number(text: str, tmp_path: Path) -> None:
    """Anything else is the judge's mistake."""
    (tmp_path / "reward.txt").write_text(text)
    with pytest.raises(EvaluatorError, match=r"reward.txt .* finite number"):
        reward_of(tmp_path)


@pytest.mark.parametrize("text", ['{"reward": "1"}', '{"reward": true}', '{"reward": NaN}', "[1]", "{", '{"a": 1e999}'])
def test_a_reward_json_is_finite_numbers_by_name(text: str, tmp_path: Path) -> None:
    """As in Harbor."""
    (tmp_path / "reward.json").write_text(text)
    with pytest.raises(EvaluatorError, match=r"reward.json"):
        reward_of(tmp_path)


def test_a_single_number_by_any_name_is_the_reward() -> None:
    """There is no other that it could be."""
    assert from_parts({"accuracy": 0.5}, "x") == Verdict(0.5, {"accuracy": 0.5})


def test_several_numbers_want_a_name() -> None:
    """The message lists them."""
    with pytest.raises(EvaluatorError, match=r"\['a', 'b'\], and no 'reward'"):
        from_parts({"a": 1, "b": 2}, "x")


def test_a_boolean_is_no_number() -> None:
    """A judge that says True meant something, but not a reward."""
    with pytest.raises(EvaluatorError, match="x is True"):
        finite(True, "x")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """What a sandbox wrote may point anywhere."""
    (tmp_path / "secret").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "secret")
    assert text_of(tmp_path / "reward.txt") == ""


def test_a_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    """It is not read into memory."""
    (tmp_path / "reward.txt").write_text("1" * 100)
    with pytest.raises(EvaluatorError, match=r"reward.txt has 100 bytes; at most 10"):
        text_of(tmp_path / "reward.txt", 10)
