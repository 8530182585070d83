"""The file of a training run: what it may say, what it means, and the sentence for what is wrong in it."""

import re
from pathlib import Path

import pytest

from polar_train.config import Config, EngineSet, Keeping, RolloutSide, read
from polar_train.errors import BadInput
from polar_train.forest import Layout
from polar_train.grpo import Settings
from polar_train.lag import Lag
from polar_train.objective import Objective

DOCUMENT = Path(__file__).parents[2] / "docs" / "training.md"
LEAST = "model = 'm'\nbatches = 'b'\nout = 'o'\n"


@pytest.fixture
def config(tmp_path):
    """Reads a text as a configuration."""

    def make(text: str) -> Config:
        file = tmp_path / "run.toml"
        file.write_text(text)
        return read(file)

    return make


def test_a_run_needs_a_model_batches_and_a_place(config, tmp_path):
    """Everything else has a default; paths are relative to the file."""
    assert config(LEAST) == Config(tmp_path / "m", tmp_path / "b", tmp_path / "o")
    for name in ("model", "batches", "out"):
        with pytest.raises(BadInput, match=rf"{name} is missing: add a path"):
            config("".join(line for line in LEAST.splitlines(keepends=True) if not line.startswith(name)))


def test_each_table_fills_its_value(config, tmp_path):
    """The keys are the fields."""
    read_ = config(
        LEAST + "follow = true\nupdates = 9\nthreads = 2\nseed = 3\nprecision = 'bfloat16'\n"
        "[update]\nlr = 1e-5\nmax_grad_norm = 0.5\nsteps = 2\nlayout = 'packed'\nrow_tokens = 100\n"
        "pass_tokens = 50\nbeta1 = 0\nbeta2 = 0.98\n"
        "[objective]\nclip_low = 0.1\nclip_high = 0.3\nimportance_cap = 2.0\nkl = 0.01\nreference = 'r'\n"
        "[lag]\nmax = 0\nbeyond = 0.5\n[engines]\nurls = ['http://a:1', 'https://b']\nversion = 'v1'\n"
        "[checkpoints]\nevery = 5\nkeep = 1\n"
    )
    assert read_.settings == Settings(1e-5, Objective(0.1, 0.3, 2.0, 0.01), 0.5, 2, Layout.PACKED, 100, 50, 0, 0.98)
    assert (read_.follow, read_.updates, read_.threads, read_.seed, read_.precision) == (True, 9, 2, 3, "bfloat16")
    assert (read_.lag, read_.reference) == (Lag(0, 0.5), tmp_path / "r")
    assert (read_.engines, read_.checkpoints) == (EngineSet(("http://a:1", "https://b"), "v1"), Keeping(5, 1))


def test_the_batches_of_a_loop_are_in_its_own_folder(config, tmp_path):
    """Unless the file names another."""
    loop = "model = 'm'\nout = 'o'\n[rollout]\ntasks = 't'\nharness = 'pi'\n"
    assert config(loop).batches == tmp_path / "o" / "batches"
    assert config(f"batches = 'x'\n{loop}").batches == tmp_path / "x"
    assert config(loop).rollout == RolloutSide(tmp_path / "t", "pi")


def test_a_harness_may_be_a_folder(config, tmp_path):
    """Then its path, like any other, is relative to the file."""
    (tmp_path / "mine").mkdir()
    rollout = config(LEAST + "[rollout]\ntasks = 't'\nharness = 'mine'\n").rollout
    assert rollout == RolloutSide(tmp_path / "t", str((tmp_path / "mine").resolve()))


FAULTS = {
    "a misspelled key": ("folow = true", r"folow is no key: the file has batches, checkpoints, .*, update, updates"),
    "a misspelled table": ("[updates]\nlr = 1", r"updates is \{'lr': 1\}: write a whole number"),
    "a misspelled key in a table": (
        "[update]\nlrr = 1",
        r"\[update\] lrr is no key: update has beta1, beta2, layout, lr, ",
    ),
    "a beta of all that was": ("[update]\nbeta1 = 1", r"\[update\] beta1 is 1: write a number from 0 to below 1"),
    "a layout of another name": ("[update]\nlayout = 'flat'", r"layout is 'flat': write one of 'per_request', "),
    "a value for a table": ("lag = 3", r"lag is 3: write a table"),
    "a KL to nothing": ("[objective]\nkl = 0.1", r"\[objective\] kl is 0.1: reference is None; give both or none"),
    "a reference for nothing": ("[objective]\nreference = 'r'", r"\[objective\] kl is None: reference is 'r'"),
    "old tokens that weigh more": ("[lag]\nbeyond = 2", r"\[lag\] beyond is 2: write a factor from 0"),
    "an engine that is no URL": ("[engines]\nurls = ['a:1']", r"\[engines\] urls is \['a:1'\]: write each engine once"),
    "an engine given twice": ("[engines]\nurls = ['http://a', 'http://a/']", r"urls is .*: write each engine once"),
    "a precision that is none": ("precision = 'int8'", r"precision is 'int8': write one of 'float32', 'bfloat16'"),
    "a pool that is none": (
        "[rollout]\ntasks = 't'\nharness = 'pi'\npools = {runs = 1}",
        r"\[rollout.pools\] runs is no key: rollout.pools has init, post, ready, run",
    ),
    "a budget that is none": (
        "[rollout]\ntasks = 't'\nharness = 'pi'\nbudgets = {seconds = 1}",
        r"\[rollout.budgets\] seconds is no key",
    ),
    "half a turn": (
        "[rollout]\ntasks = 't'\nharness = 'pi'\nbudgets = {turns = 1.5}",
        r"\[rollout.budgets\] turns is 1.5: write a whole number of at least 1",
    ),
    "sampling of an unknown kind": (
        "[rollout]\ntasks = 't'\nharness = 'pi'\nsampling = {temprature = 1}",
        r"\[rollout\] sampling is \{'temprature': 1\}: .* unknown 'temprature'",
    ),
    "an advantage of another name": (
        "[rollout]\ntasks = 't'\nharness = 'pi'\nadvantage = 'ppo'",
        r"\[rollout\] advantage is 'ppo': write one of 'grpo', 'rloo', 'dr-grpo'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_is_told_in_one_sentence(config, fault):
    """File, table, key, value and remedy."""
    text, sentence = FAULTS[fault]
    with pytest.raises(BadInput, match=sentence) as refused:
        config(LEAST + text)
    assert "run.toml': " in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_run_cannot_follow_a_file(config, tmp_path):
    """Nothing comes into it."""
    (tmp_path / "b").touch()
    with pytest.raises(BadInput, match="batches is 'b': a run that follows reads a folder"):
        config(LEAST + "follow = true")


def test_the_documented_file_is_read_and_shows_every_default(config):
    """What stands behind `# default` in docs/training.md is what a run without the line gets."""
    text = re.search(r"    # run.toml\n(?:    .*\n|\n)+", DOCUMENT.read_text())[0]
    whole = "".join(f"{line[4:]}\n" for line in text.splitlines())
    least = "".join(line for line in whole.splitlines(keepends=True) if "# default" not in line)
    assert whole.count("# default") > 20
    assert config(whole) == config(least)


def test_the_documented_file_shows_every_key():
    """A key that is not there is a key that nobody finds."""
    text = DOCUMENT.read_text()
    for kind in (Config, Settings, Objective, Lag, EngineSet, Keeping, RolloutSide):
        made = {"settings", "objective", "lag", "engines", "checkpoints", "rollout"}
        for name in kind.__slots__:
            assert name in made or re.search(rf"^    (?:# )?{name} = ", text, re.MULTILINE), name
