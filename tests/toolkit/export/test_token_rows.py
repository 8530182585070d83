"""Trajectories as rows of prompt, response and mask."""

import numpy as np
import pytest

from polar_toolkit import calls
from polar_toolkit.errors import Refusal
from polar_toolkit.export import Source
from polar_toolkit.export.token_rows import token_rows


@pytest.fixture
def source(run):
    """The run of the fixtures, merged."""
    return Source(calls.find_runs(run), run / "merged")


def test_a_prompt_ends_before_the_first_token_that_is_trained_here(source):
    """A turn that an earlier branch trains is prompt of the later one."""
    first, second, *_ = token_rows(source)
    assert (first.prompt_ids.tolist(), first.response_ids[0]) == ([1, 2], 100)
    assert (second.prompt_ids.tolist(), second.response_ids.tolist()) == ([1, 2, 100, 101, 102, 103, 3, 4], [106, 107])


def test_prompt_and_response_are_the_trajectory(source):
    """Context between turns has mask 0 and logprob 0."""
    first = next(token_rows(source))
    assert first.ids.tolist() == [1, 2, 100, 101, 102, 103, 3, 104, 105]
    assert first.loss_mask.tolist() == [1, 1, 1, 1, 0, 1, 1]
    assert first.logprobs[4] == 0


def test_sessions_are_numbered_in_the_export_and_in_their_group(source):
    """A session without a group is one."""
    members = {row.member.session[1]: row.member for row in token_rows(source, rewarded=False)}
    places = {name: (m.number, m.group, m.group_number, m.place) for name, m in members.items()}
    assert places == {"one": (0, "g", 0, 0), "two": (1, "g", 0, 1), "three": (2, "run/three", 1, 0)}


def test_sessions_without_a_reward_are_left_out_and_counted(source):
    """What is exported and what is left out is all that is trained."""
    rows = list(token_rows(source))
    assert {row.member.session[1] for row in rows} == {"one", "two"}
    assert (source.tally.trained, source.tally.left_out, source.tally.sampled) == (14, {"no_reward": 1}, 15)


def test_the_last_row_of_a_session_is_known(source):
    """Whatever their number."""
    assert [row.last for row in token_rows(source)] == [False, False, True, True]


def test_versions_are_names_and_numbers(source):
    """An integer stands for itself, another name for its place among those met."""
    rows = list(token_rows(source))
    assert [row.versions for row in rows] == [("v0",), ("7",), ("v0",), ("v0",)]
    assert [row.version_numbers for row in rows] == [(0,), (7,), (0,), (0,)]


def test_arrays_keep_their_types(source):
    """int32, uint8 and float32, as in the trajectories."""
    row = next(token_rows(source))
    assert (row.ids.dtype, row.loss_mask.dtype, row.logprobs.dtype) == (np.int32, np.uint8, np.float32)


def test_a_root_that_is_not_merged_is_refused(tmp_path, run):
    """With the command that helps."""
    with pytest.raises(Refusal, match="polar-toolkit merge"):
        list(token_rows(Source(calls.find_runs(run), tmp_path / "nothing")))
