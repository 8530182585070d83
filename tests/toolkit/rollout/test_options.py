"""What is asked of a rollout, and what is taken where nothing is asked."""

from __future__ import annotations

import json
import os

from polar_toolkit.rollout.options import (
    Overrides,
    attempts,
    chosen,
    default_pools,
    from_json,
    shard_of,
)
from polar_toolkit.rollout.outcome import Status
from polar_toolkit.rollout.task import Budget
from tests.toolkit.rollout.acting import options, tasks


def test_options_survive_json(tmp_path):
    """A resumed rollout asks for the same."""
    asked = options(
        tmp_path, only=("b", "a"), shard=(2, 3), enough=4, rewarded=(Status.TIMEOUT,), budget=Overrides(turns=5),
        tokenizer="folder",
    )  # fmt: skip
    assert from_json(json.loads(json.dumps(asked.as_json()))) == asked


def test_tasks_asked_for_by_name_are_worked_on_in_that_order(tmp_path):
    """Each once; without a name, all of them."""
    some = tasks("a", "b", "c")
    assert [task.task_id for task in chosen(options(tmp_path, only=("c", "a", "c")), some)] == ["c", "a"]
    assert chosen(options(tmp_path), some) == some


def test_shards_are_whole_groups_and_together_all_of_them(tmp_path):
    """Runners that each take one neither collide nor leave a task out."""
    some = tasks("a", "b", "c", "d", "e")
    parts = [shard_of(options(tmp_path, shard=(part, 2)), some) for part in (1, 2)]
    assert [[task.task_id for task in part] for part in parts] == [["a", "c", "e"], ["b", "d"]]


def test_seeds_differ_and_do_not_depend_on_the_shard(tmp_path):
    """Each attempt has its own, made of the rollout's."""
    some = tasks("a", "b")
    seeds = {each.attempt_id: each.seed for each in attempts(options(tmp_path, samples=3), some)}
    assert len(set(seeds.values())) == 6
    (alone, *_) = attempts(options(tmp_path, samples=3), some[1:])
    assert alone.seed == seeds["b.1"]
    assert attempts(options(tmp_path, seed=1), some)[0].seed != seeds["a.1"]
    assert all(0 <= seed < 1 << 31 for seed in seeds.values())


def test_a_budget_of_the_rollout_takes_the_place_of_the_tasks(tmp_path):
    """Only where it is given."""
    (attempt,) = attempts(options(tmp_path, budget=Overrides(run_s=5.0, tokens=9)), tasks("a"))
    assert attempt.task.budget == Budget(run_s=5.0, tokens=9)


def test_pools_go_with_each_other():
    """What is prepared ahead follows what runs, so that a harness that ends is followed at once."""
    pools = default_pools(run=20)
    assert pools.run == 20
    assert pools.ready == 20 + pools.init
    assert default_pools().run == 4 * (os.cpu_count() or 1)


def test_the_interceptor_gets_no_tokenizer_that_was_not_asked_for(tmp_path):
    """Then the engine's own is taken."""
    assert "polar_tokenizer" not in options(tmp_path).settings()
    assert options(tmp_path, tokenizer="folder").settings()["polar_tokenizer"] == "folder"
