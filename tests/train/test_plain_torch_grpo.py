"""examples/plain_torch_grpo.py: the same step without this project."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from polar_train.grpo import Settings, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_torch_grpo.py"


def test_the_example_makes_the_same_step_as_polar_train(tiny_model, write, draw, tmp_path):
    """Loss and gradient norm agree on packed rows, clipped tokens and a temperature, and its checkpoint loads."""
    batches = write(draw(60, 21, 33, temperature=0.7), draw(45, seed=1, temperature=1.3))
    command = [sys.executable, EXAMPLE, batches, tiny_model, tmp_path / "plain"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loss, norm = map(float, re.fullmatch(r"loss (\S+) gradient norm (\S+)\n", done.stdout).groups())
    train(batches, tiny_model, tmp_path / "ours", Settings(), advance=lambda _done, _planned: None)
    ours = json.loads((tmp_path / "ours" / "train.json").read_text())["updates"][0]
    assert loss == pytest.approx(ours["loss"], rel=1e-4)
    assert norm == pytest.approx(ours["grad_norm"], rel=1e-4)
    assert 0 < ours["clip_share"] < 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "plain")


def test_the_example_needs_nothing_of_this_project():
    """At most 40 lines, and only torch, transformers and pyarrow beside the standard library."""
    text = EXAMPLE.read_text()
    tree = ast.parse(text)
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {name.split(".")[0] for name in imports} - set(sys.stdlib_module_names)
    assert foreign == {"torch", "transformers", "pyarrow"}
    assert len(text.splitlines()) <= 40
