"""polar_train.plot: runs as one picture of small panels."""

import itertools
import math

import pytest

from polar_train.errors import BadInput
from polar_train.metrics import append
from polar_train.plot import COLOURS, DASHES, FEW, FILE, MARKERS, draw, figure

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def run(tmp_path, record):
    """A folder with the metrics of a run of some steps."""

    def make(name: str, steps: int = 3, **told: object):
        out = tmp_path / name
        out.mkdir(parents=True)
        for step in range(1, steps + 1):
            append(out, record(step, **told))
        return out

    return make


def panel(whole, title):
    """The panel whose title begins so."""
    (axes,) = [axes for axes in whole.axes if axes.get_title(loc="left").startswith(title)]
    return axes


def curve(axes, name):
    """The labelled curve of a run in a panel."""
    (line,) = [line for line in axes.lines if line.get_label() == name]
    return list(line.get_xdata()), list(line.get_ydata())


def test_the_picture_goes_into_the_runs_folder(run):
    """As a PNG of a size to look at."""
    out = run("one")
    assert draw([out]) == out / FILE
    assert (out / FILE).read_bytes().startswith(PNG)


def test_every_figure_of_a_run_has_its_panel(record):
    """Reward, loss, ratio, clip share, KL, entropy, gap, lag, speed and dead groups."""
    whole = figure({"a": [record(1), record(2)]})
    titles = [axes.get_title(loc="left") for axes in whole.axes]
    beginnings = ["reward", "loss", "ratio", "clipped", "KL", "entropy", "logprob gap", "lag", "trained tokens", "dead"]
    assert [title[: len(start)] for title, start in zip(titles, beginnings, strict=True)] == beginnings
    assert panel(whole, "logprob gap").get_yscale() == "log"
    assert panel(whole, "loss").get_yscale() == "linear"


def test_a_curve_has_the_values_of_its_steps(record):
    """Each at its own step, also when steps are left out."""
    whole = figure({"a": [record(2, reward_mean=0.25, dead_groups=1), record(5, reward_mean=0.75, dead_groups=3)]})
    assert curve(panel(whole, "reward"), "a") == ([2, 5], [0.25, 0.75])
    assert curve(panel(whole, "dead"), "a") == ([2, 5], [0.25, 0.75])


def test_runs_are_laid_over_each_other_with_a_legend(record):
    """Under their names, in every panel."""
    whole = figure({"seed-0": [record(1)], "seed-1": [record(1)]})
    (legend,) = whole.legends
    assert [text.get_text() for text in legend.get_texts()] == ["seed-0", "seed-1"]
    for axes in whole.axes:
        curve(axes, "seed-0")
        curve(axes, "seed-1")


def test_runs_are_told_apart_without_colour(record):
    """By dashes and markers: no two of thirty look the same without them."""
    whole = figure({str(number): [record(1)] for number in range(4)})
    lines = [line for line in panel(whole, "reward").lines if line.get_label().isdigit()]
    assert len({line.get_marker() for line in lines}) == 4
    pairs = itertools.islice(zip(itertools.cycle(DASHES), itertools.cycle(MARKERS), strict=False), 30)
    assert len(set(pairs)) == 30
    assert len(COLOURS) == len(MARKERS)


def test_a_long_run_is_smoothed_and_says_so(record):
    """The trailing mean over a tenth of it is strong, and what it is the mean of stays in sight."""
    steps = 10 * FEW
    rewards = [float(step % 2) for step in range(steps)]
    whole = figure({"a": [record(step + 1, reward_mean=reward) for step, reward in enumerate(rewards)]})
    axes = panel(whole, "reward")
    assert set(curve(axes, "a")[1][FEW:]) == {0.5}
    assert rewards in [list(line.get_ydata()) for line in axes.lines]
    assert axes.get_title(loc="right") == "strong: trailing mean over a tenth of the run"


def test_what_was_not_recorded_says_so(record):
    """An empty panel would look like a fault of the picture."""
    whole = figure({"a": [record(1, reward_mean=None, gap_mean=0.0), record(2, reward_mean=None, gap_mean=0.0)]})
    for title in ("reward", "logprob gap"):
        assert [text.get_text() for text in panel(whole, title).texts] == ["not recorded"]
    assert list(panel(whole, "loss").texts) == []


def test_steps_without_a_number_are_gaps(record, tmp_path):
    """The others are drawn; nothing warns."""
    whole = figure({"a": [record(1), record(2, kl_mean=math.nan, groups=0, dead_groups=0), record(3)]})
    whole.savefig(tmp_path / "gaps.png")
    assert [math.isnan(one) for one in curve(panel(whole, "KL"), "a")[1]] == [False, True, False]


def test_runs_of_the_same_name_are_named_by_their_paths(run, tmp_path):
    """Two legends that say the same would say nothing."""
    outs = [run("first/out"), run("second/out")]
    picture = draw(outs, tmp_path / "both.svg")
    text = picture.read_text()
    assert all(str(out) in text for out in outs)


def test_an_existing_picture_is_not_overwritten(run):
    """Unless it is forced."""
    out = run("one")
    (out / FILE).write_text("kept")
    with pytest.raises(BadInput, match="exists and is not overwritten: give --force"):
        draw([out])
    assert (out / FILE).read_text() == "kept"
    draw([out], force=True)
    assert (out / FILE).read_bytes().startswith(PNG)


def test_a_folder_without_metrics_draws_nothing(run, tmp_path):
    """Not even what the other folder holds."""
    with pytest.raises(BadInput, match=r"holds no metrics\.jsonl"):
        draw([run("one"), tmp_path], tmp_path / "new.png")
    assert not (tmp_path / "new.png").exists()


@pytest.mark.parametrize(
    ("name", "complaint"), [("curves.txt", "ends in .png, .svg or .pdf"), ("nowhere/curves.png", "is not a folder")]
)
def test_an_unusable_name_of_the_picture_is_refused(run, tmp_path, name, complaint):
    """With a sentence that says which would do."""
    with pytest.raises(BadInput, match=complaint):
        draw([run("one")], tmp_path / name)
