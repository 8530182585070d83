"""Paths and URLs."""

from pathlib import Path

import pytest

from polar_toolkit.errors import Refusal
from polar_toolkit.locations import is_of_this_process, is_remote, location


def test_a_path_is_a_path():
    """Also one with a colon."""
    assert location("runs/a:b") == Path("runs/a:b")


def test_a_file_url_is_the_local_path(tmp_path):
    """So that renames and locks work there."""
    found = location(f"file://{tmp_path}/a%20b")
    assert (found, is_remote(found)) == (tmp_path / "a b", False)


def test_any_other_url_speaks_pathlib_and_is_remote():
    """memory:// is seen by this process alone."""
    found = location("memory://bucket/runs")
    assert is_remote(found)
    assert is_of_this_process(found)
    (found / "first").mkdir(parents=True)
    (found / "first" / "file").write_text("text")
    assert [path.read_text() for path in (found / "first").iterdir()] == ["text"]


@pytest.mark.parametrize("url", ["nonsense://bucket", "hdfs2://x/y"])
def test_a_protocol_that_nothing_here_speaks_is_refused(url):
    """The sentence names the URL."""
    with pytest.raises(Refusal, match=url):
        location(url)
