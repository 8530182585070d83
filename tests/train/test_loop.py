"""When a round begins, when it is learned from, and where a loop goes on."""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from polar_train import loop
from polar_train.config import Config, EngineSet, Keeping, RolloutSide
from polar_train.errors import BadInput
from polar_train.lag import Lag
from polar_train.rounds import Rounds

CONFIG = Config(Path("model"), Path("batches"), Path("out"), updates=4)


@dataclass
class Trainer:
    """Learns by counting; batches whose names are in `dead` teach nothing."""

    happened: list[str]
    dead: tuple[str, ...] = ()
    step: int = 0
    batches: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> "Trainer":
        return self

    def take(self, batch: Path) -> str | None:
        self.happened.append(f"learn {batch.name}")
        if batch.name in self.dead:
            return None
        self.step += 1
        return batch.name


def happened(config: Config, *, dead: tuple[str, ...] = (), before: int = 0) -> list[str]:
    """What is done in which order, rounds being made at once; `before` rounds were learned from earlier."""
    events: list[str] = []

    def begin(round: int) -> Future[Path]:
        events.append(f"begin {round}")
        future: Future[Path] = Future()
        future.set_result(Path(str(round)))
        return future

    loop.learn(
        config, Trainer(events, dead, before), begin, before,
        seen=lambda _: None, say=lambda _: None, stop=threading.Event(),
    )  # fmt: skip
    return events


def test_without_lag_rolling_out_and_learning_alternate():
    """A round begins when the one before it is learned from."""
    assert happened(replace(CONFIG, updates=3, lag=Lag(0))) == [
        "begin 1", "learn 1", "begin 2", "learn 2", "begin 3", "learn 3",
    ]  # fmt: skip


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_a_round_is_never_further_ahead_than_the_bound_allows(lag):
    """Round r begins when at least r - 1 - lag are learned from; and as soon as that is so."""
    learned = 0
    for event in happened(replace(CONFIG, updates=9, lag=Lag(lag))):
        kind, number = event.split()
        if kind == "learn":
            learned += 1
        else:
            assert learned == max(0, int(number) - 1 - lag)


def test_no_round_begins_that_would_not_be_learned_from():
    """The last update is the end."""
    events = happened(replace(CONFIG, updates=2, lag=Lag(5)))
    assert events == ["begin 1", "begin 2", "learn 1", "learn 2"]


def test_a_dead_round_is_no_update():
    """Another one is made in its place."""
    events = happened(replace(CONFIG, updates=2, lag=Lag(0)), dead=("1",))
    assert [event for event in events if "learn" in event] == ["learn 1", "learn 2", "learn 3"]


def test_what_was_learned_from_is_not_learned_from_again():
    """A loop that starts again goes on with the first round that is not in the newest checkpoint."""
    events = happened(replace(CONFIG, updates=4, lag=Lag(1)), before=2)
    assert events == ["begin 3", "begin 4", "learn 3", "learn 4"]


def test_the_rounds_of_the_newest_checkpoint_are_learned_from(tmp_path):
    """A dead round among them is one, too."""
    side = RolloutSide(tasks=tmp_path, harness="pi", groups=1)
    made = Rounds(tmp_path, tmp_path, ("http://127.0.0.1:1",), side, ("a",))
    batches = {made.batch(round).name: "" for round in (1, 2, 3)}
    assert loop.Maker(made, 0, lambda: False).learned(Trainer([], step=2, batches=batches)) == 3
    assert loop.Maker(made, 0, lambda: False).learned(Trainer([])) == 0


def test_a_round_that_is_made_is_not_made_again(tmp_path):
    """Its batch is there."""
    side = RolloutSide(tasks=tmp_path, harness="pi", groups=1)
    made = Rounds(tmp_path, tmp_path, ("http://127.0.0.1:1",), side, ("a",))
    made.batch(1).parent.mkdir()
    made.batch(1).touch()
    assert loop.Maker(made, 0, lambda: False).make(1) == made.batch(1)
    with pytest.raises(loop.Stopped):
        loop.Maker(made, 0, lambda: True).make(1)


def test_checkpoints_that_are_not_of_every_step_are_refused(tmp_path):
    """An engine gets its weights from them, and the bound on lag would not hold."""
    rows = tmp_path / "tasks.jsonl"
    rows.write_text('{"id": "a", "instruction": "do", "check": {"kind": "output", "contains": "x"}}\n')
    asked = replace(
        CONFIG, rollout=RolloutSide(tasks=rows, harness="pi", groups=1), engines=EngineSet(("http://127.0.0.1:1",)),
        checkpoints=Keeping(every=2), out=tmp_path / "out",
    )  # fmt: skip
    with pytest.raises(BadInput, match="every is 2"):
        loop.run(asked, seen=lambda _: None, advance=lambda *_: None, say=lambda _: None)
    assert not (tmp_path / "out").exists()
