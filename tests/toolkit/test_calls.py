"""Reading runs."""

import numpy as np
import pytest

from polar_toolkit import calls
from polar_toolkit.errors import Refusal, UnreadableFile


def test_a_folder_with_calls_or_journal_is_a_run(tmp_path, book):
    """The folder itself is taken."""
    book.call("a", [1], [2])
    run = book.write(tmp_path / "first")
    assert calls.find_runs(run) == [run]


def test_a_folder_of_runs_gives_its_runs_by_name(tmp_path, new_book):
    """Other folders, such as an earlier merge, are not taken."""
    for name in ("b", "a"):
        book = new_book(run_id=name)
        book.call(f"{name}1", [1], [2])
        book.write(tmp_path / name)
    (tmp_path / "merged").mkdir()
    assert [run.name for run in calls.find_runs(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_folder_with_nothing_is_refused_with_the_remedy(tmp_path, name):
    """The sentence says how to record a run."""
    with pytest.raises(Refusal, match=r"holds no run.*mitmdump"):
        calls.find_runs(tmp_path / name)


def test_buffers_are_int32_and_float32(book):
    """Token ids and logprobs keep their types."""
    book.call("a", [1, 2], [3])
    (call,) = book.calls()
    assert (call.prompt_suffix.dtype, call.output_ids.dtype) == (np.int32, np.int32)
    assert call.logprobs.dtype == np.float32
    assert (call.prompt_suffix.tolist(), call.output_ids.tolist()) == ([1, 2], [3])


def test_what_was_recorded_of_the_edge_is_kept_as_it_is(book):
    """Evidence, drift and the window of a root are text for those who count and show them."""
    book.call("a", [1], [2], root_window='{"class": "edited"}')
    book.call("b", [1, 2, 3], [4], parent="a", parent_evidence="pointer", rerender_shared=1, drift='{"class": "other"}')
    assert [(c.evidence, c.rerender_shared, c.drift, c.root_window) for c in book.calls()] == [
        (None, None, None, '{"class": "edited"}'),
        ("pointer", 1, '{"class": "other"}', None),
    ]


def test_a_refused_call_without_tokens_is_a_call(book):
    """Null columns become empty buffers and named unknowns."""
    nothing = dict.fromkeys(("session_id", "kind", "prompt_len", "prompt_suffix", "prompt_hash", "output_ids"))
    book.call("a", [], [], **nothing, logprobs=None, versions=None, temperature=None, status="refused")
    (call,) = book.calls()
    assert (call.session_id, call.kind, call.prompt_len, len(call.output_ids)) == ("", "unknown", 0, 0)


def test_a_run_is_read_from_its_sealed_files(tmp_path, book):
    """Rows come back in order."""
    book.call("b", [1], [2])
    book.call("a", [1, 2, 3], [4], parent="b")
    assert [call.call_id for call in calls.read(book.write(tmp_path / "r"))] == ["b", "a"]


def test_a_truncated_file_is_refused_by_name(tmp_path, book):
    """The error names the file."""
    book.call("a", [1], [2])
    sealed = book.write(tmp_path / "r") / "calls" / "w-000001.parquet"
    sealed.write_bytes(sealed.read_bytes()[:-10])
    with pytest.raises(UnreadableFile, match=r"w-000001\.parquet"):
        calls.read(tmp_path / "r")


def test_a_broken_run_json_is_refused_by_name(tmp_path):
    """The error names the file."""
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UnreadableFile, match=r"run\.json"):
        calls.run_info(tmp_path)


def test_sessions_of_one_name_in_two_runs_are_two_sessions(new_book):
    """A session's name is unique only inside its run."""
    one, two = new_book(run_id="x"), new_book(run_id="y")
    one.call("a", [1], [2])
    two.call("b", [1], [2])
    assert list(calls.by_session(one.calls() + two.calls())) == [("x", "s"), ("y", "s")]
