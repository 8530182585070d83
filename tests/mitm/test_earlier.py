"""The finished calls of a session, read back from the run folder as they were kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from polar_mitm.earlier import earlier_calls
from polar_mitm.tips import Kept
from tests.mitm.test_desk import ASKED, MORE, SAID, row, write


def test_a_call_that_is_read_back_is_the_call_that_was_kept(tmp_path: Path) -> None:
    """In all but the outline of its body: parent, tokens to the end of what was kept, thread, kind, what was said."""
    given = row("c", MORE, reply=SAID, history=(ASKED, SAID), parent_call_id="a" * 20, parent_choice=0)
    given |= {"kept_len": 2, "thread_id": "t", "kind": "subagent"}
    write(tmp_path, row("a", ASKED, reply=SAID, history=()), given)
    _, read = earlier_calls(tmp_path, "s")
    kept = Kept.of(given)
    assert read.output_ids.tolist() == kept.output_ids.tolist() == [10, 11]
    assert read.suffix.tolist() == kept.suffix.tolist()
    assert read.suffix.dtype == read.output_ids.dtype == np.int32
    names = ("place", "parent", "history_key", "tools_key", "outline", "thread", "kind", "said")
    assert [getattr(read, name) for name in names] == [getattr(kept, name) for name in names]


def test_parents_come_before_their_children(tmp_path: Path) -> None:
    """Also over several processes."""
    for index, name in enumerate("abcd"):
        link = {"parent_call_id": "abcd"[index - 1] * 20, "parent_choice": 0} if index else {}
        write(tmp_path, row(name, ASKED, reply=SAID, history=(), **link))
    assert [call.call_id[0] for call in earlier_calls(tmp_path, "s")] == ["a", "b", "c", "d"]


def test_what_was_not_finished_is_not_read_back(tmp_path: Path) -> None:
    """Nobody has its reply. A refused request, whose body may be any text, does no harm."""
    refused = row("b", ASKED, reply=SAID, history=(), request='"no JSON object"')
    write(tmp_path, row("a", ASKED, reply=SAID, history=()) | {"status": "lost"}, refused)
    assert [call.call_id[0] for call in earlier_calls(tmp_path, "s")] == ["b"]
    assert earlier_calls(tmp_path, "nobody") == []
