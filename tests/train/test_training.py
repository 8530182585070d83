"""A run of many batches: what it writes, how it ends, and that a killed one loses nothing."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing, suppress
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from polar_train import checkpoints, lifetime, metrics, training
from polar_train.config import Config, EngineSet, Keeping
from polar_train.control import Engine
from polar_train.errors import BadInput, NothingLearned
from polar_train.grpo import Settings
from polar_train.objective import Objective
from tests.train.engine_sets import running

CHILD = """
import os, resource, signal, sys
from pathlib import Path
from polar_train import training
from polar_train.config import Config, EngineSet
from polar_train.grpo import Settings

def learn(model, batches, out):
    done = 0

    def seen(record):
        nonlocal done
        done = record.step
        if done == 2 and out.name == "between batches":
            os.kill(os.getpid(), signal.SIGKILL)
        if done == 2 and out.name == "in a checkpoint":  # the kernel ends us in the middle of the next large file
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

    def advance(passes, planned):
        if done == 2 and out.name == "in an update":
            os.kill(os.getpid(), signal.SIGKILL)

    config = Config(model, batches, out, threads=1, engines=EngineSet(version="v1"), settings=Settings(lr=1e-4))
    training.run(config, seen=seen, advance=advance)

model, batches, *outs = map(Path, sys.argv[1:])
for out in outs:  # one import of torch for all
    if not (child := os.fork()):
        learn(model, batches, out)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # or the next child would say it again
"""
DEATHS = {
    "between batches": -signal.SIGKILL,
    "in an update": -signal.SIGKILL,
    "in a checkpoint": -signal.SIGXFSZ,
}


def silent(_done: int, _planned: int) -> None:
    """Progress for tests."""


@pytest.fixture
def put(tmp_path, as_batch, draw):
    """Puts a batch with a seed of its own into the folder of batches, as a rename does: whole."""
    folder = tmp_path / "batches"
    folder.mkdir()

    def make(number, *, advantage=None):
        drawn = draw(40, 30, 22, seed=number)
        for one in drawn:
            one.advantage = one.advantage if advantage is None else advantage
        part = folder / f".{number}"
        pq.write_table(as_batch(drawn), part)
        return part.rename(folder / f"batch-{number:05d}.parquet")

    return make


@pytest.fixture
def config(tiny_model, tmp_path):
    """A run over the folder of batches."""
    return Config(
        model=tiny_model, batches=tmp_path / "batches", out=tmp_path / "out", threads=1,
        engines=EngineSet(version="v1"), settings=Settings(lr=1e-4),
    )  # fmt: skip


def go(config, **more):
    """Runs, and gives the records."""
    records = []
    training.run(config, seen=records.append, advance=silent, **more)
    return records


def names(out):
    return [path.name for path in sorted((out / "checkpoints").iterdir())]


def died(*folders):
    """How the children ended that learned in each of the folders."""
    arguments = [sys.executable, "-c", CHILD, *map(str, folders)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, process_group=0) as child:
        try:
            return [int(line) for line in child.stdout]
        finally:
            with suppress(ProcessLookupError):  # all have ended, as they should
                os.killpg(child.pid, signal.SIGKILL)


def test_each_batch_is_a_step_with_a_checkpoint_and_a_line(config, put):
    """In the order of the names; the newest two checkpoints stay, and metrics.jsonl has every step."""
    for number in (2, 0, 1):
        put(number)
    records = go(config)
    assert [record.batch for record in records] == [f"batch-0000{n}.parquet" for n in (0, 1, 2)]
    assert [record.version for record in records] == ["step-000001", "step-000002", "step-000003"]
    assert names(config.out) == ["step-000002", "step-000003"]
    assert metrics.read(config.out) == records
    assert len({record.loss for record in records}) == 3


def test_the_figures_of_a_step(config, put):
    """Tokens, sessions and lag are the batch's; a token a step old counts so."""
    put(0), put(1)
    first, second = go(config)
    assert (first.sessions, first.groups, first.dead_groups) == (3, 1, 0)
    assert first.tokens_trained == sum(length // 2 - length // 3 + length // 5 for length in (40, 30, 22))
    assert first.tokens_computed >= first.tokens_trained
    assert (first.lag_mean, second.lag_mean, second.lag_max) == (0, 1, 1)
    assert 0 < first.seconds < 60
    assert first.idle_s == 0


def test_a_killed_run_goes_on_to_the_same_numbers(config, put, tmp_path):
    """Killed by the kernel at its worst moments, a resumed run has the losses and weights of one that was not."""
    for number in range(4):
        put(number)
    outs = [tmp_path / where for where in DEATHS]
    assert died(config.model, config.batches, *outs) == list(DEATHS.values())
    assert names(tmp_path / "in a checkpoint")[0] == ".step-000003"
    whole = go(replace(config, out=tmp_path / "whole"))
    weights = load_file(tmp_path / "whole/checkpoints/step-000004/model.safetensors")
    for out in outs:
        assert checkpoints.newest(out).name == "step-000002"
        assert [record.step for record in go(replace(config, out=out))] == [3, 4]
        both = metrics.read(out)
        assert [record.loss for record in both] == pytest.approx([one.loss for one in whole], abs=1e-6, rel=0)
        assert [record.grad_norm for record in both] == pytest.approx([one.grad_norm for one in whole], rel=1e-6)
        resumed = load_file(out / "checkpoints/step-000004/model.safetensors")
        assert all((weight - weights[name]).abs().max() < 1e-6 for name, weight in resumed.items())
        assert names(out) == ["step-000003", "step-000004"]


def test_without_the_optimizer_the_numbers_would_differ(config, put, tmp_path):
    """The negative control: a run that forgets its moments has other losses behind it."""
    for number in range(4):
        put(number)
    whole = go(replace(config, out=tmp_path / "whole"))
    go(replace(config, updates=2))
    fresh = replace(config, model=checkpoints.newest(config.out), out=tmp_path / "fresh")
    (tmp_path / "rest").mkdir()
    for number in (2, 3):
        (config.batches / f"batch-0000{number}.parquet").rename(tmp_path / "rest" / f"batch-0000{number}.parquet")
    again = go(replace(fresh, batches=tmp_path / "rest"))
    assert abs(again[1].loss - whole[3].loss) > 1e-6


def test_a_finished_run_makes_nothing_twice(config, put):
    """Started again it takes no batch, and a new one is the next step."""
    put(0)
    assert len(go(config)) == 1
    assert go(config) == []
    put(1)
    assert [record.step for record in go(config)] == [2]


def test_updates_end_the_run(config, put):
    """Behind so many steps in all, also over several starts."""
    for number in range(3):
        put(number)
    assert len(go(replace(config, updates=1))) == 1
    assert len(go(replace(config, updates=2))) == 1
    assert go(replace(config, updates=2)) == []


def test_checkpoints_are_as_far_apart_as_asked_and_the_last_is_there(config, put):
    """Every second step and the last one; a run that was killed between them does a step again, and its line once."""
    for number in range(3):
        put(number)
    config = replace(config, checkpoints=Keeping(every=2, keep=9))
    go(config)
    assert names(config.out) == ["step-000002", "step-000003"]
    for file in sorted((config.out / "checkpoints" / "step-000003").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (config.out / "checkpoints" / "step-000003").rmdir()
    before = metrics.read(config.out)
    go(config)
    assert [record.loss for record in metrics.read(config.out)] == [record.loss for record in before]


def test_following_takes_a_batch_that_appears_later(config, put):
    """The run waits for it, and a file named `done` ends it behind what is there."""
    put(0)
    arrived, said = [], []

    def seen(record):
        arrived.append(record.batch)
        if record.step == 2:
            put(2)
            (config.batches / "done").touch()

    def say(line):
        said.append(line)
        if line == "waiting for a batch" and not (config.batches / "batch-00001.parquet").exists():
            put(1)

    steps = training.run(replace(config, follow=True), seen=seen, advance=silent, say=say)
    assert steps == 3
    assert arrived == [f"batch-0000{n}.parquet" for n in (0, 1, 2)]
    assert "waiting for a batch" in said


def test_following_waits_for_a_folder_that_is_not_there_yet(config, tmp_path):
    """And ends when it is asked to."""
    stop = threading.Event()
    config = replace(config, batches=tmp_path / "later", follow=True)
    assert training.run(config, seen=print, advance=silent, say=lambda _line: stop.set(), stop=stop) == 0


def test_asked_to_stop_it_finishes_the_step_and_goes_on_later(config, put, tmp_path):
    """SIGINT in the middle of an update: the update is made and its checkpoint written, though none was due."""
    for number in range(3):
        put(number)
    whole = go(replace(config, out=tmp_path / "whole"))
    config = replace(config, checkpoints=Keeping(every=100))
    records = []
    with lifetime.interrupts() as stop:
        steps = training.run(
            config, seen=records.append, advance=lambda _done, _planned: signal.raise_signal(signal.SIGINT), stop=stop
        )
        assert stop.is_set()
    assert (steps, len(records)) == (1, 1)
    assert names(config.out) == ["step-000001"]
    rest = go(config)
    assert [one.loss for one in records + rest] == pytest.approx([one.loss for one in whole], abs=1e-6, rel=0)


def test_a_batch_without_advantage_is_counted_and_changes_nothing(config, put):
    """It is said, is no step, and the next batch is as if it had not been."""
    put(0), put(1, advantage=0.0), put(2)
    said = []
    records = go(config, say=said.append)
    assert [record.step for record in records] == [1, 2]
    assert said == ["'batch-00001.parquet' has nothing to learn from: no trained token has an advantage"]


def test_a_run_that_learns_nothing_is_an_error(config, put):
    """When no batch has an advantage there is no model to be had."""
    put(0, advantage=0.0)
    with pytest.raises(NothingLearned, match=r"no step was made: 'batch-00000\.parquet' has nothing to learn from"):
        go(config)
    assert checkpoints.newest(config.out) is None


def test_several_updates_of_a_batch_are_one_step_of_one_optimizer(config, put):
    """`steps` of [update]: more passes over the batch, and still one version."""
    put(0)
    (record,) = go(replace(config, settings=Settings(lr=1e-4, steps=2)))
    (once,) = go(replace(config, out=config.out.with_name("once")))
    assert record.step == 1
    assert record.tokens_computed == 2 * once.tokens_computed
    assert (record.gap_mean, record.loss == once.loss) == (once.gap_mean, False)


def test_computing_in_bfloat16_is_near_and_resumes_alike(config, put, tmp_path):
    """The loss is that of float32 to two digits; the weights on the disk are float32 and a resumed run is the same."""
    for number in range(3):
        put(number)
    exact = go(replace(config, out=tmp_path / "exact"))
    rough = replace(config, precision="bfloat16")
    whole = go(replace(rough, out=tmp_path / "whole"))
    assert [one.loss for one in whole] == pytest.approx([one.loss for one in exact], rel=0.05)
    assert [one.loss for one in whole] != [one.loss for one in exact]
    go(replace(rough, updates=1))
    assert {str(t.dtype) for t in load_file(config.out / "checkpoints/step-000001/model.safetensors").values()} == {
        "torch.float32"
    }
    rest = go(rough)
    assert [one.loss for one in rest] == pytest.approx([one.loss for one in whole[1:]], abs=1e-6, rel=0)


def test_the_folder_of_another_model_is_refused(config, put, tmp_path):
    """Nothing in it is touched."""
    put(0)
    go(config)
    before = {path: path.stat().st_mtime_ns for path in config.out.rglob("*") if path.name != ".lock"}
    other = checkpoints.newest(config.out)
    with pytest.raises(BadInput, match="began with another model than"):
        go(replace(config, model=other))
    assert {path: path.stat().st_mtime_ns for path in config.out.rglob("*") if path.name != ".lock"} == before


def test_other_batches_of_the_same_names_are_refused(config, put):
    """They would be passed over in silence."""
    put(0)
    go(config)
    (config.batches / "batch-00000.parquet").unlink()
    put(9).rename(config.batches / "batch-00000.parquet")
    with pytest.raises(BadInput, match=r"learned from another batch of the name 'batch-00000\.parquet'"):
        go(config)


def test_another_name_of_the_first_weights_is_refused(config, put):
    """The lag of a token is counted from it."""
    put(0)
    go(config)
    with pytest.raises(BadInput, match=r"first weights of the run in .* 'v1', not 'v2'"):
        go(replace(config, engines=EngineSet(version="v2")))


def test_two_runs_in_one_folder_are_refused(config, put):
    """The second ends with a sentence while the first is at work."""
    put(0)

    def advance(_done, _planned):
        with pytest.raises(BadInput, match="another process is training in"):
            go(config)

    training.run(config, seen=lambda _record: None, advance=advance)


def test_no_batches_is_one_sentence(config, tmp_path):
    """Nothing was there, and nothing was to come."""
    with pytest.raises(BadInput, match="no batches at"):
        go(replace(config, batches=tmp_path / "nowhere"))


def test_a_model_that_is_not_there_is_one_sentence(config, tmp_path):
    """Before anything is written into `out` but its lock."""
    with pytest.raises(BadInput, match="no model at"):
        go(replace(config, model=tmp_path / "nowhere"))
    assert [path.name for path in config.out.iterdir()] == [".lock"]


def test_out_that_is_a_file_is_one_sentence(config, tmp_path):
    """And the file stays."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BadInput, match="is a file: give a folder"):
        go(replace(config, out=tmp_path / "file"))


def test_kl_needs_a_reference(config, put):
    """As `polar-train step` does."""
    put(0)
    with pytest.raises(BadInput, match="give both or neither"):
        go(replace(config, settings=Settings(objective=Objective(kl=0.1))))


def test_the_engines_get_every_checkpoint(config, put, tiny_model):
    """Under its version, with the idle seconds in the figures; a resumed run brings an engine that was started anew."""
    put(0)
    put(1)
    with running(tiny_model) as one, running(tiny_model) as other:
        engines = EngineSet(urls=(one.url, other.url), version="v1")
        with pytest.raises(BadInput, match="calls its weights 'default', not 'v1'"):
            go(replace(config, engines=engines))
        for url in engines.urls:
            with closing(Engine(url)) as engine:
                engine.load(tiny_model, "v1")
        records = go(replace(config, engines=engines, updates=1))
        assert [engine.held().version for engine in (one, other)] == ["step-000001"] * 2
        assert one.held().folder == str(checkpoints.newest(config.out).resolve())
        assert records[0].idle_s > 0
    with running(tiny_model) as anew:
        assert go(replace(config, engines=replace(engines, urls=(anew.url,)), updates=1)) == []
        assert anew.held().version == "step-000001"
        assert [record.version for record in go(replace(config, engines=replace(engines, urls=(anew.url,))))] == [
            "step-000002"
        ]
        assert anew.held().version == "step-000002"


def test_weights_named_like_a_later_step_are_refused(config, put):
    """Their tokens could not be told from those of that step."""
    put(0)
    with pytest.raises(BadInput, match="as later weights of this run will be called"):
        go(replace(config, engines=EngineSet(version="step-000003")))
