"""`polar-train loop` with the real Pi, mitmdump and the embedded engine: it learns, and it goes on after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from examples.learn_tiny import LOOP, engine, letters_by_round, make_model, write_tasks
from polar_train import metrics
from tests.bench.provisions import HARNESS_BIN, ROOT, harness_binary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOOP_COMMAND = [sys.executable, "-c", "from polar_train.entry import main; main()", "loop"]
WAIT_S = 300


@pytest.fixture
def environment() -> dict[str, str]:
    """With Pi on the path."""
    harness_binary("pi")
    return os.environ | {"PATH": os.pathsep.join([str(HARNESS_BIN), os.environ["PATH"]])}


def test_a_random_model_raises_its_reward(tmp_path: Path, environment: dict[str, str]):
    """What Pi prints has many more small letters in the last two rounds than in the first two."""
    command = [sys.executable, str(ROOT / "examples" / "learn_tiny.py"), str(tmp_path), "--rounds", "10"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    shares = letters_by_round(tmp_path / "out")
    assert sum(shares[-2:]) / 2 > sum(shares[:2]) / 2 + 0.15, shares
    rewards = [record.reward_mean for record in metrics.read(tmp_path / "out")]
    assert rewards == pytest.approx(shares[: len(rewards)], abs=1e-6)


def test_a_loop_that_is_killed_in_a_round_goes_on_with_it(tmp_path: Path, environment: dict[str, str]):
    """No attempt that had ended is made again, and every round is learned from once."""
    make_model(tmp_path / "model", 0)
    write_tasks(tmp_path / "tasks.jsonl", "letters")
    events = tmp_path / "out" / "rounds" / "00001" / "1" / "rollout" / "events.jsonl"
    with engine(tmp_path) as url:
        (tmp_path / "loop.toml").write_text(LOOP.format(url=url, rounds=2, seed=0))
        command = [*LOOP_COMMAND, str(tmp_path / "loop.toml")]
        with subprocess.Popen(command, env=environment) as first:
            before = ended(events)
            until = time.monotonic() + WAIT_S
            while not before and first.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
                before = ended(events)
            first.kill()
        assert before, "no attempt ended"
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert set(ended(events).values()) == {1}
    assert len(ended(events)) == 32
    assert [record.step for record in metrics.read(tmp_path / "out")] == [1, 2]


def ended(events: Path) -> Counter[str]:
    """How often each attempt was done, as the events of a rollout say."""
    lines = events.read_text().splitlines() if events.exists() else []
    rows = [json.loads(line) for line in lines if '"event": "ended"' in line and line.endswith("}")]
    return Counter(row["outcome"]["attempt_id"] for row in rows if not row["missing"])
