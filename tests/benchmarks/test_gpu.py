"""The GPU benchmark's small size on the CPU: gradients agree, every layout is measured, and it says what it is."""

import json

import torch

from benchmarks.gpu import SIZES, SMALL, main
from polar_train.forest import Layout, lay_out


def test_the_small_size_runs_on_a_cpu(tmp_path, capsys):
    """All gradients within their limits, the control beyond its own, and a line of figures for each layout."""
    main(["--cpu", "--out", str(tmp_path / "gpu.jsonl")])
    machine, *lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert machine["device"] == "CPU"
    assert "No figure is of a GPU" in capsys.readouterr().out
    for figure in (line for line in lines if "limit" in line and line["limit"] is not None):
        met = figure["value"] >= figure["limit"] if figure["least"] else figure["value"] <= figure["limit"]
        assert met, figure
    costs = {line["way"]: line for line in lines if "way" in line}
    assert set(costs) == set(Layout)
    assert costs["tree"]["tokens"] < costs["packed"]["tokens"] < costs["per_request"]["tokens"]


def test_the_sessions_of_a_group_share_their_prompt_and_nothing_else():
    """So a tree holds the prompt once, and each session's own tokens."""
    rows = SMALL.rows(SIZES["small"].vocabulary)
    own = SMALL.calls * (SMALL.drawn + SMALL.seen) - SMALL.seen
    (tree,) = lay_out(rows, Layout.TREE, 100_000)
    assert sum(row.trained for row in rows) == SMALL.sessions * SMALL.calls * SMALL.drawn
    assert abs(len(tree) - SMALL.prompt - SMALL.sessions * own) <= SMALL.sessions  # first tokens may be equal by chance


def test_a_model_of_its_figures_has_them():
    """Grouped queries and heads as given, in the precision that was asked for."""
    model = SIZES["small"].model(torch.device("cpu"), torch.bfloat16)
    assert (model.config.num_key_value_heads, model.config.head_dim, model.dtype) == (2, 16, torch.bfloat16)
