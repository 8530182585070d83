"""polar_train.screen: a table and a bar on a terminal, lines elsewhere."""

from io import StringIO

import pytest
from rich.console import Console

from polar_train.screen import Screen, duration, shown


def terminal(width=80, height=24) -> Console:
    return Console(file=StringIO(), width=width, height=height, force_terminal=True)


def lines_of(screen, width=80) -> list[str]:
    """The picture as text."""
    console = Console(file=StringIO(), width=width)
    console.print(screen.picture())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_without_a_terminal_each_step_is_a_line(record):
    """Nothing in it moves a cursor; passes are not told."""
    console = Console(file=StringIO(), width=40)
    with shown(console, updates=None) as screen:
        screen.advance(1, 2)
        screen.seen(record(1, reward_mean=0.25, dead_groups=1, groups=4))
        screen.seen(record(2, reward_mean=None))
    first, second = console.file.getvalue().splitlines()
    assert first.startswith("step 1, reward 0.250, loss ")
    assert "dead 1/4" in first
    assert second.startswith("step 2, reward -, loss ")
    assert "\x1b" not in console.file.getvalue()


def test_what_is_said_is_a_line_when_it_is_another():
    """Saying the same again, as a run does that waits, is silent."""
    console = Console(file=StringIO())
    with shown(console, updates=None) as screen:
        for line in ("going on behind step 3", "waiting for a batch", "waiting for a batch"):
            screen.say(line)
    assert console.file.getvalue().splitlines() == ["going on behind step 3", "waiting for a batch"]


def test_on_a_terminal_what_was_said_stands_until_the_step_begins(record):
    """In the place of the bar, with its seconds."""
    clock = iter([0.0, 10.0, 15.0, 20.0, 22.0])
    screen = Screen(terminal(), None, clock=lambda: next(clock))
    screen.say("waiting for the rollouts of round 1")
    assert lines_of(screen) == ["waiting for the rollouts of round 1, 5 s"]
    screen.advance(1, 2)
    (bar,) = lines_of(screen)
    assert bar.startswith("training")


def test_on_a_terminal_what_was_said_passes_above_what_is_said_next(record):
    """What a step has overtaken does not; nothing that matters flashes by."""
    console = terminal()
    screen = Screen(console, None)
    for line in ("waiting for round 1", "round 1 teaches nothing", "waiting for round 2"):
        screen.say(line)
    screen.advance(1, 1)
    screen.seen(record(1))
    screen.say("waiting for round 3")
    assert console.file.getvalue().splitlines() == ["waiting for round 1", "round 1 teaches nothing"]


def test_a_line_tells_how_long_the_rest_takes(record):
    """By the time between the steps so far: 60 s each, and three to go."""
    console = Console(file=StringIO())
    with shown(console, updates=5) as screen:
        screen.seen(record(1, at=1000.0))
        screen.seen(record(2, at=1060.0))
    first, second = console.file.getvalue().splitlines()
    assert "left" not in first
    assert second.endswith(", 3 min left")


def test_the_table_fits_80_columns(record):
    """Wide numbers included, with every figure under its name."""
    screen = Screen(terminal(), None)
    screen.seen(
        record(12345, reward_mean=-0.123, loss=-0.1234, ratio_mean=123.456, clip_share=0.999, groups=128,
               dead_groups=128, tokens_per_second=123456, seconds=12345, lag_mean=12.5)
    )  # fmt: skip
    header, row = lines_of(screen)[:2]
    assert header.split() == ["step", "reward", "loss", "ratio", "clip", "KL", "gap", "lag", "tok/s", "dead", "s"]
    assert row.split()[0::10] == ["12345", "12345"]
    assert "…" not in row
    assert max(len(header), len(row)) <= 80


def test_a_low_terminal_shows_the_last_steps(record):
    """The bar below them must not be pushed out of it."""
    screen = Screen(terminal(height=11), None)
    for step in range(1, 30):
        screen.seen(record(step))
    assert [line.split()[0] for line in lines_of(screen)] == ["step", "27", "28", "29", "reading"]


def test_the_bar_counts_forests(record):
    """And the seconds since the step began."""
    clock = iter([0.0, 10.0, 10.0, 52.0])
    screen = Screen(terminal(), 5, clock=lambda: next(clock))
    screen.seen(record(1))
    screen.advance(1, 12)
    screen.advance(5, 12)
    made, bar = lines_of(screen)[-2:]
    assert made == "step 1 of 5"
    assert bar.startswith("training ━")
    assert bar.endswith("5 of 12 forests, 42 s")


def test_before_the_first_step_it_says_so():
    """Loading a model takes its time."""
    clock = iter([0.0, 3.0])
    assert lines_of(Screen(terminal(), None, clock=lambda: next(clock))) == ["starting, 3 s"]


def test_on_a_terminal_the_last_picture_stays(record):
    """What others print passes above it; at the end no bar is left, but what was said last."""
    console = terminal()
    with shown(console, updates=3) as screen:
        screen.seen(record(1, reward_mean=0.125))
        console.print("said by another")
        screen.advance(1, 2)
        screen.seen(record(2, reward_mean=0.875))
        screen.say("stopped")
    text = Console(file=StringIO(), width=80).render_str(console.file.getvalue()).plain
    last = text[text.rindex("reward") :]
    assert "said by another" in text
    assert ("0.125" in last, "0.875" in last) == (True, True)
    assert "step 2 of 3" in last
    assert "stopped" in last
    assert "stopped, " not in last


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (89.4, "89 s"), (90, "2 min"), (3599, "1 h 0 min"), (3 * 3600 + 300, "3 h 5 min")],
)
def test_durations_as_people_say_them(seconds, said):
    """Two parts at most."""
    assert duration(seconds) == said
