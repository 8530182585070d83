"""The merged folder is replaced as a whole or not at all."""

import pytest

from polar_toolkit import merged, trajectories
from polar_toolkit.errors import Refusal, UnreadableFile


def make(folder, text):
    with merged.replacing(folder) as fresh:
        (fresh / "file").write_text(text)


def test_a_folder_takes_the_place_of_the_earlier_one(tmp_path):
    """Nothing of the earlier one stays, and nothing else is left beside it."""
    make(tmp_path / "merged", "one")
    make(tmp_path / "merged", "two")
    assert (tmp_path / "merged" / "file").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_a_failure_leaves_the_earlier_one(tmp_path):
    """An error in the middle changes nothing."""
    make(tmp_path / "merged", "one")
    with pytest.raises(ZeroDivisionError), merged.replacing(tmp_path / "merged"):
        _ = 1 / 0
    assert (tmp_path / "merged" / "file").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_a_foreign_folder_is_never_replaced(tmp_path):
    """Without the marker it is somebody else's."""
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "thesis.tex").write_text("precious")
    with pytest.raises(Refusal, match="was not made by"):
        make(tmp_path / "merged", "two")
    assert (tmp_path / "merged" / "thesis.tex").read_text() == "precious"


def test_an_empty_folder_may_be_filled(tmp_path):
    """There is nothing to lose."""
    (tmp_path / "merged").mkdir()
    make(tmp_path / "merged", "one")
    assert (tmp_path / "merged" / "file").read_text() == "one"


def test_a_folder_without_trajectories_is_refused_with_the_remedy(tmp_path):
    """The sentence says how to make them."""
    with pytest.raises(Refusal, match="polar-toolkit merge"):
        merged.read_trajectories(tmp_path / "merged")


@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    """The error names the file."""
    with (
        merged.replacing(tmp_path / "merged") as fresh,
        merged.Rows(merged.trajectory_part(fresh, 0)) as part,
    ):
        part.write(trajectories.to_table([], {}))
    part = tmp_path / "merged" / "trajectories" / "part-00000.parquet"
    if damage == "truncated":
        part.write_bytes(part.read_bytes()[:-8])
    else:
        merged.pq.write_table(trajectories.SCHEMA.empty_table().select(["reward"]), part)
    with pytest.raises(UnreadableFile, match="part-00000"):
        merged.read_trajectories(tmp_path / "merged")


def test_a_missing_report_is_refused_by_name(tmp_path):
    """The error names the file."""
    with pytest.raises(UnreadableFile, match=r"report\.json"):
        merged.read_report(tmp_path)
