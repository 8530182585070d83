"""polar_toolkit.rollout.board: the counts of a rollout and the picture of them."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from polar_toolkit.rollout.board import WINDOW_S, Board, Stage, line_of
from polar_toolkit.rollout.interceptor import Figures
from polar_toolkit.rollout.outcome import Outcome, Status
from polar_toolkit.rollout.task import Attempt, Check, Task


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def attempts(groups: int, samples: int) -> list[Attempt]:
    tasks = [Task(f"task-{number}", "Do it.", Check("command")) for number in range(1, groups + 1)]
    return [Attempt(task, sample) for task in tasks for sample in range(1, samples + 1)]


def ended(attempt: Attempt, status: Status = Status.COMPLETED, reward: float | None = None, note: str = "") -> Outcome:
    names = (attempt.attempt_id, attempt.session_id, attempt.group_id, attempt.task.task_id)
    return Outcome(*names, attempt.sample, 1, 0, status, note, reward)


def printed(board: Board, rows: int = 12) -> str:
    written = StringIO()
    Console(width=80, file=written).print(board.view(rows))
    return written.getvalue()


def work(board: Board, attempt: Attempt) -> None:
    for stage in (Stage.INIT, Stage.READY, Stage.RUN, Stage.POST):
        board.enter(attempt.attempt_id, stage)


def test_each_group_is_a_row_with_its_counts():
    """One attempt runs, one waits; the third ended with a reward of 0.5."""
    first, second, _ = all_of = attempts(1, 3)
    board = Board(all_of)
    work(board, first)
    board.end(ended(first, reward=0.5))
    board.enter(second.attempt_id, Stage.INIT)
    board.enter(second.attempt_id, Stage.RUN)
    header, row, *_ = printed(board).splitlines()
    assert header.split()[:8] == ["group", "wait", "init", "ready", "run", "post", "done", "reward"]
    assert row.split() == ["task-1", "1", "·", "·", "1", "·", "1", "0.50"]


def test_an_attempt_that_is_tried_again_is_counted_once():
    """Another try enters init again: nothing stays behind in run."""
    (only,) = all_of = attempts(1, 1)
    board = Board(all_of)
    work(board, only)
    board.enter(only.attempt_id, Stage.INIT)
    assert printed(board).splitlines()[1].split() == ["task-1", "·", "1", "·", "·", "·", "·", "-"]


def test_other_ends_than_completed_are_named():
    """A row names the most frequent one and how many other kinds there are; the state of all names each."""
    all_of = attempts(1, 4)
    board = Board(all_of)
    statuses = (Status.TIMEOUT, Status.TIMEOUT, Status.SETUP_FAILED, Status.COMPLETED)
    for attempt, status in zip(all_of, statuses, strict=True):
        board.end(ended(attempt, status))
    assert "2 timeout +1" in printed(board)
    assert "not completed: 2 timeout, 1 setup_failed" in board.lines()


def test_of_many_groups_those_at_work_are_shown():
    """One line stands for the rest, so that the table fits a terminal whatever the number of tasks."""
    all_of = attempts(100, 2)
    board = Board(all_of)
    for attempt in all_of[:4]:
        work(board, attempt)
        board.end(ended(attempt))
    work(board, all_of[4])
    lines = printed(board).splitlines()
    assert lines[1].split()[0] == "task-3"
    assert lines[2].strip() == "and 99 more groups: 0 at work, 97 wait, 2 done"


def test_more_groups_at_work_than_rows_are_counted():
    """The table never has more rows than it was given."""
    all_of = attempts(30, 1)
    board = Board(all_of)
    for attempt in all_of:
        board.enter(attempt.attempt_id, Stage.RUN)
    assert "and 26 more groups: 26 at work, 0 wait, 0 done" in printed(board, rows=4)


def test_everything_fits_eighty_columns():
    """Long names and large numbers are cut, not wrapped into a second line of the table."""
    task = Task("a" * 80, "Do it.", Check("command"))
    all_of = [Attempt(task, sample) for sample in range(1, 2_001)]
    board = Board(all_of)
    for attempt in all_of[:1500]:
        board.end(ended(attempt, Status.EVALUATOR_FAILED))
    lines = printed(board).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[1] == "500"
    assert lines[2].startswith("1500 of 2000 attempts")


def test_tokens_per_second_are_those_of_the_last_half_minute():
    """A minute at 10 tokens a second, then half a minute at 100."""
    clock = Clock()
    board = Board(attempts(1, 1), clock)
    sampled = 0
    for second in range(91):
        clock.now = float(second)
        board.feed(Figures(calls=0, running=0, waiting=0, sampled=sampled, sessions={}))
        sampled += 10 if second < 90 - WINDOW_S else 100
    assert board.tokens_per_second() == 100


def test_the_rest_is_estimated_from_the_attempts_worked_on():
    """Attempts that an earlier start had finished are done, but say nothing about how long one takes."""
    clock = Clock()
    all_of = attempts(1, 4)
    board = Board(all_of, clock)
    board.end(ended(all_of[0], reward=1.0))
    work(board, all_of[1])
    clock.now = 60.0
    board.end(ended(all_of[1], reward=0.0))
    assert board.lines()[0] == "2 of 4 attempts, reward 0.50, 1 min 00 s, about 2 min 00 s to go"


def test_attempts_at_work_count_for_the_estimate_by_their_stage():
    """One is done and two run: two of four attempts' work in a minute."""
    clock = Clock()
    all_of = attempts(1, 4)
    board = Board(all_of, clock)
    for attempt in all_of[:3]:
        board.enter(attempt.attempt_id, Stage.RUN)
    clock.now = 60.0
    board.end(ended(all_of[0]))
    assert board.lines()[0] == "1 of 4 attempts, 1 min 00 s, about 1 min 00 s to go"


def test_what_waits_for_what_is_said():
    """The engine for set-up, prepared attempts for a slot, all for a saturated engine, the end for verdicts."""
    first, second = all_of = attempts(1, 2)
    board = Board(all_of)
    board.enter(first.attempt_id, Stage.INIT)
    assert board.lines()[-1] == "the engine waits for 1 to be prepared"
    board.enter(first.attempt_id, Stage.RUN)
    board.enter(second.attempt_id, Stage.READY)
    assert board.lines()[-1] == "1 prepared waits for a run slot"
    board.hold("the engine is saturated")
    assert board.lines()[-1] == "new runs wait: the engine is saturated; 1 prepared waits"
    board.hold("")
    for attempt in all_of:
        board.enter(attempt.attempt_id, Stage.POST)
    assert board.lines()[-1] == "2 wait for a verdict"


def test_calls_of_the_interceptor_are_shown():
    """How many are done, run, and wait for their first token."""
    board = Board(attempts(1, 1))
    board.feed(Figures(calls=1_200, running=16, waiting=9, sampled=0, sessions={}))
    assert "0 tokens/s, 0 sampled; calls: 1,200 done, 16 running (9 wait)" in board.lines()


def test_a_listener_hears_of_each_end():
    """That is how plain lines are printed; the board itself keeps no outcome."""
    (only,) = all_of = attempts(1, 1)
    board, heard = Board(all_of), list[Outcome]()
    board.listener = heard.append
    board.end(ended(only, Status.SETUP_FAILED, note="no image"))
    assert [line_of(outcome) for outcome in heard] == [
        "task-1.1 setup_failed, no reward, 0 calls, 0 tokens, 0 s: no image"
    ]


def test_when_all_of_many_groups_are_done_there_is_no_empty_table():
    """One line says so."""
    all_of = attempts(20, 1)
    board = Board(all_of)
    for attempt in all_of:
        work(board, attempt)
        board.end(ended(attempt))
    assert printed(board).splitlines()[0] == "20 groups: 0 at work, 0 wait, 20 done"
