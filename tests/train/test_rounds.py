"""Which tasks a round has, what makes its batch, and when it is made."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from polar_toolkit import rewards
from polar_train import rounds
from polar_train.config import Config, EngineSet, RolloutSide, read
from polar_train.errors import BadInput, NothingLearned
from polar_train.rounds import Rounds, tasks_of

ROOT = Path(__file__).parent.parent.parent
TASKS = ("a", "b", "c", "d", "e")


@pytest.fixture
def side(tmp_path: Path) -> RolloutSide:
    """Five tasks, two a round."""
    file = tmp_path / "tasks.jsonl"
    check = {"kind": "output", "contains": "x"}
    file.write_text("".join(json.dumps({"id": name, "instruction": "do", "check": check}) + "\n" for name in TASKS))
    return RolloutSide(tasks=file, harness="pi", groups=2)


def config(tmp_path: Path, side: RolloutSide | None, *urls: str) -> Config:
    engines = EngineSet(urls or ("http://127.0.0.1:1",))
    return Config(tmp_path / "model", tmp_path / "out" / "batches", tmp_path / "out", engines=engines, rollout=side)


def flags(words: list[str]) -> dict[str, str]:
    """The last value of each flag."""
    return {word: words[at + 1] for at, word in enumerate(words) if word.startswith("--")}


def test_an_epoch_has_no_task_twice(side):
    """Five tasks make two rounds of two; the one left over waits for another epoch's shuffle."""
    first = [*tasks_of(1, TASKS, side), *tasks_of(2, TASKS, side)]
    assert len({*first}) == 4
    assert first != [*tasks_of(3, TASKS, side), *tasks_of(4, TASKS, side)]


def test_no_task_is_left_out_for_good(side):
    """Over many epochs each comes about as often."""
    seen = Counter(name for round in range(1, 201) for name in tasks_of(round, TASKS, side))
    assert min(seen[name] for name in TASKS) > 60


def test_the_tasks_of_a_round_are_those_of_the_seed(side):
    """Whatever was made before."""
    assert tasks_of(7, TASKS, side) == tasks_of(7, TASKS, side)
    assert [tasks_of(n, TASKS, side) for n in range(1, 9)] != [
        tasks_of(n, TASKS, replace(side, seed=1)) for n in range(1, 9)
    ]


def test_a_rollout_is_told_what_the_configuration_says(tmp_path, side):
    """Under the toolkit's names; what is not said has the toolkit's default."""
    side = replace(side, sampling={"max_new_tokens": 9}, pools={"run": 3}, budgets={"run_seconds": 60.0, "turns": 5})
    ((command, source, run, *words),) = rounds.of(config(tmp_path, side)).rollouts(3)
    assert (command, source, run) == ("rollout", str(side.tasks), str(tmp_path / "out" / "rounds" / "00003" / "1"))
    told = flags(words)
    assert told["--sampling"] == '{"max_new_tokens": 9}'
    assert (told["--pool-run"], told["--run-seconds"], told["--turns"], told["--seed"]) == ("3", "60", "5", "3")
    assert told["--tokenizer"] == str(tmp_path / "model")
    assert not {"--way", "--command", "--enough"} & told.keys()


def test_several_engines_share_the_tasks_of_a_round(tmp_path, side):
    """Each is asked by a rollout of its own, and a group is never split."""
    made = rounds.of(config(tmp_path, side, "http://127.0.0.1:1", "http://127.0.0.1:2"))
    first, second = made.rollouts(1)
    assert [flags(first)["--engine"], flags(second)["--engine"]] == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert {flags(first)["--only"], flags(second)["--only"]} == {*tasks_of(1, TASKS, side)}
    assert first[2] != second[2]


def test_a_rollout_that_was_begun_is_gone_on_with(tmp_path, side):
    """By what it was asked for then, but the engine may have moved."""
    made = rounds.of(config(tmp_path, side))
    plan = made.folder(1) / "1" / "rollout" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text("{}")
    run = str(made.folder(1) / "1")
    assert made.rollouts(1) == [["rollout", "--resume", run, "--engine", "http://127.0.0.1:1"]]


def settled(made: Rounds, content: bytes) -> Path:
    merged = made.folder(1) / "merged" / "batches" / "batch-00000.parquet"
    merged.parent.mkdir(parents=True)
    merged.write_bytes(content)
    made.settle(1)
    return made.batch(1)


def test_a_merged_round_has_its_batch_under_its_own_name(tmp_path, side):
    """And nothing else lies where the trainer looks."""
    batch = settled(rounds.of(config(tmp_path, side)), b"rows")
    assert batch == (tmp_path / "out" / "batches" / "round-00001.parquet").resolve()
    assert [file.name for file in batch.parent.iterdir()] == ["round-00001.parquet"]
    assert batch.read_bytes() == b"rows"


def test_a_round_without_any_reward_is_an_error_that_says_where_to_look(tmp_path, side):
    """The next round would go the same way."""
    with pytest.raises(NothingLearned, match="no attempt of round 1 has a reward"):
        rounds.of(config(tmp_path, side)).settle(1)


def test_what_cannot_be_a_loop_is_refused(tmp_path, side):
    """Before anything is started."""
    with pytest.raises(BadInput, match="no table"):
        rounds.of(config(tmp_path, None))
    with pytest.raises(BadInput, match="urls is empty"):
        rounds.of(replace(config(tmp_path, side), engines=EngineSet()))
    with pytest.raises(BadInput, match=r"groups is 6: .* at most the 5 tasks"):
        rounds.of(config(tmp_path, replace(side, groups=6)))
    with pytest.raises(BadInput, match="does not exist"):
        rounds.of(config(tmp_path, replace(side, tasks=tmp_path / "nothing")))


def test_the_set_up_of_the_paper_is_a_loop():
    """examples/reproduce_paper/codex.toml has the figures of its README: four tasks, sixteen attempts, an epoch."""
    asked = read(ROOT / "examples" / "reproduce_paper" / "codex.toml")
    assert asked.rollout
    assert (asked.rollout.harness, asked.rollout.groups, asked.rollout.samples) == ("codex", 4, 16)
    assert (asked.settings.lr, asked.updates, asked.lag.max) == (1e-6, 293 // 4, 2)
    objective = asked.settings.objective
    assert (objective.clip_low, objective.clip_high, objective.importance_cap) == (0.2, 0.28, 2.0)


def test_shuffled_rewards_are_the_same_ones_in_other_places(tmp_path, side):
    """The control of an experiment; without being asked for, they stay."""
    chosen = rounds.of(
        config(tmp_path, replace(side, shuffle_rewards=True), "http://127.0.0.1:1", "http://127.0.0.1:2")
    )
    given = {number: {f"s{number}{n}": float(10 * number + n) for n in range(4)} for number in (1, 2)}
    runs = {number: chosen.folder(1) / str(number) for number in given}
    for number, run in runs.items():
        run.mkdir(parents=True)
        (run / "sessions.jsonl").write_text("".join(json.dumps({"session_id": s}) + "\n" for s in given[number]))
        rewards.append(run, given[number])
    rounds.of(config(tmp_path, side)).shuffle(1)
    assert {number: rewards.read(run) for number, run in runs.items()} == given
    chosen.shuffle(1)
    after = {number: rewards.read(run) for number, run in runs.items()}
    assert after != given
    assert sorted(r for of in after.values() for r in of.values()) == sorted(
        r for of in given.values() for r in of.values()
    )
