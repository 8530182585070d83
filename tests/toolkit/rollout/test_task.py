"""Attempts are named after their task, and each further try is a session of its own."""

from __future__ import annotations

from polar_toolkit.rollout.task import Attempt, Check, Task

TASK = Task("count-lines", "Count them.", Check("command"))


def test_an_attempt_is_its_task_and_sample():
    """Its group is the task's: samples of one task are compared with each other."""
    attempt = Attempt(TASK, 3)
    assert (attempt.attempt_id, attempt.session_id, attempt.group_id) == (
        "count-lines.3",
        "count-lines.3",
        "count-lines",
    )


def test_another_try_is_another_session_of_the_same_attempt():
    """Its calls are not mixed with those of the try that failed."""
    again = Attempt(TASK, 3, tried=2)
    assert (again.attempt_id, again.session_id) == ("count-lines.3", "count-lines.3.try2")
