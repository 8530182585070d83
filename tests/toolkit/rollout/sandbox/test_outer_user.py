"""Who a local sandbox is from outside. That it is so: test_local.py and test_unprivileged.py."""

from __future__ import annotations

import os
from pathlib import Path

from polar_toolkit.rollout.sandbox.outer_user import give, new_outer_user, outer_user

ALL, NONE, STRIPPED = (f"Name:\tx\nCapEff:\t{value}\n" for value in ("000001ffffffffff", "0" * 16, "00000000a80425fb"))
WHOLE, SMALL = "0 0 4294967295\n", "0 1000 1\n1 100000 65535\n"


def test_root_gives_each_sandbox_an_id_of_its_own():
    """Far above any that a system gives away."""
    ids = {outer_user(0, ALL, WHOLE) for _ in range(20)}
    assert len(ids) > 15
    assert all(uid and uid >= 2_000_000_000 for uid in ids)


def test_a_container_with_few_ids_has_nobodys():
    """What is not mapped cannot be become."""
    assert outer_user(0, ALL, SMALL) == 65534


def test_who_may_not_become_others_stays_who_they_are():
    """A user, and the root of a container that was stripped of its rights."""
    assert outer_user(1000, NONE, WHOLE) is None
    assert outer_user(0, STRIPPED, WHOLE) is None
    assert (new_outer_user() is None) == (os.geteuid() != 0)


def test_what_is_given_is_given_with_all_that_is_in_it(tmp_path: Path):
    """Links themselves, and not what they lead to."""
    (tmp_path / "given" / "deep").mkdir(parents=True)
    (tmp_path / "given" / "deep" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").write_text("")
    uid = 2_000_000_007 if os.geteuid() == 0 else os.geteuid()
    give(tmp_path / "given", uid)
    assert (tmp_path / "given" / "deep" / "link").lstat().st_uid == uid
    assert (tmp_path / "kept").stat().st_uid == os.geteuid()
