"""What people read before and after a rollout."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from polar_toolkit.rollout import summary
from polar_toolkit.rollout.options import Overrides
from polar_toolkit.rollout.outcome import Outcome, Status
from polar_toolkit.rollout.runner import STOPPED
from tests.toolkit.rollout.acting import options, recipe, tasks


def row(group, sample, status=Status.COMPLETED, reward=None, note=""):
    name = f"{group}.{sample}"
    return Outcome(
        name, name, group, group, sample, 1, 0, status, note, reward, trained=reward is not None, run_s=4.0, calls=2,
        sampled_tokens=10,
    )  # fmt: skip


def text(table):
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


ROWS = [
    row("a", 1, reward=1.0),
    row("a", 2, reward=0.0),
    row("b", 1, Status.TIMEOUT, 0.5),
    row("b", 2, Status.EVALUATOR_FAILED, note="the tests do not start"),
]


def test_each_status_has_its_figures():
    """And all together theirs."""
    lines = text(summary.status_table(ROWS)).splitlines()
    assert lines[1].split() == ["completed", "2", "0.50", "4", "20", "0.0", "0.0", "4.0", "0.0"]
    assert lines[-1].split()[:5] == ["all", "4", "0.50", "8", "40"]


def test_each_group_has_its_rewards():
    """Mean, least, most, how many are trained, and what did not complete."""
    lines = text(summary.group_table(ROWS)).splitlines()
    assert lines[1].split() == ["a", "0.50", "0.00", "1.00", "2", "of", "2"]
    assert lines[2].split() == ["b", "0.50", "0.50", "0.50", "1", "of", "2", "1", "timeout,", "1", "evaluator_failed"]


def test_of_many_groups_those_are_shown_whose_rewards_differ_most():
    """They are the ones that teach."""
    flat = [row(f"flat-{n}", sample, reward=1.0) for n in range(30) for sample in (1, 2)]
    table = text(summary.group_table([*flat, *ROWS[:2]]))
    assert "group (20 of 31, those whose rewards differ most)" in table
    assert "\na " in table


def test_the_last_lines_name_what_is_broken_and_the_next_command(tmp_path):
    """Merge, or resume where something is missing."""
    said = list(summary.last_lines(ROWS, options(tmp_path)))
    assert said[0] == "1 x the tests do not start"
    assert said[-1] == f"next: polar-toolkit merge {tmp_path}"
    stopped = [*ROWS, row("c", 1, Status.CANCELLED, note=STOPPED)]
    assert (
        list(summary.last_lines(stopped, options(tmp_path)))[-1] == f"next: polar-toolkit rollout --resume {tmp_path}"
    )
    nothing = [replace(each, reward=None, trained=False) for each in ROWS]
    assert "no reward was given" in list(summary.last_lines(nothing, options(tmp_path)))[-1]


def test_a_plan_is_told_in_sentences(tmp_path):
    """Attempts, shard, harness, pools; and each task's budget as it will be."""
    asked = options(tmp_path, samples=4, shard=(1, 2), enough=2, budget=Overrides(turns=9))
    said = "\n".join(summary.plan_lines(tasks("a", "b"), asked, recipe(), "acted"))
    assert "2 tasks x 4 samples = 8 attempts (shard 1 of 2)" in said
    assert "a group is done with 2 rewards" in said
    assert text(summary.task_table(tasks("a"), asked)).splitlines()[1].split()[-2:] == ["9", "-"]
