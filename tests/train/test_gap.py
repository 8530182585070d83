"""The gap between trainer and engine, by edge: sessions recorded through the gateway, with the embedded engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from polar_mitm.identity import register
from polar_mitm.tokens import load
from polar_toolkit import merge, rewards
from polar_train.cli import app
from polar_train.errors import BadInput, Disagreement
from polar_train.gap import ALL, UNTOLD, Gap, check, measure
from polar_train.small_models import fetch
from tests.mitm.house import House, open_house
from tests.train.test_serve import changed_copy, serving

LIMIT = 1e-4
KINDS = ["exact", "inside(n)", "root(first)", "root(tools_changed)", "root(unknown_history)"]
Json = dict[str, Any]  # Any: bodies
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A merged run and the models that sampled it."""

    merged: Path
    model: Path
    """Sampled as version `default`."""
    later: Path
    """Sampled as version `later`, the last session only."""

    @property
    def batches(self) -> Path:
        """All of its batches."""
        return self.merged / "batches"


class Talk:
    """A harness of one session that says what it is told to, on whatever history it is given."""

    def __init__(self, house: House, session: str) -> None:
        self._house, self._key = house, f"{session}:{register(house.run, session, 'group')}"

    def ask(self, *history: Json, tool: str = "look") -> Json:
        """The reply to a history, as a message; an agent's call offers a tool."""
        tools = [{"type": "function", "function": {"name": tool, "parameters": PARAMETERS}}]
        body = {"model": "any", "messages": list(history), "tools": tools}
        answer = self._house.post("/v1/chat/completions", body, authorization=f"Bearer {self._key}")
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]


def user(text: str) -> Json:
    """A message of the user."""
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Two sessions whose history goes on, is edited, is cut, and gets other tools; and one under later weights."""
    folder = tmp_path_factory.mktemp("gap")
    run, model = folder / "run", fetch("tiny-qwen3")
    later = changed_copy(model, folder / "later")
    sampling = json.dumps({"temperature": 0.8, "max_new_tokens": 16, "seed": 3})
    with serving(model) as engine, open_house(run, engine.url, load(model), sampling=sampling) as house:
        house.client.timeout = httpx.Timeout(120)
        for name in ("one", "two"):
            talk = Talk(house, name)
            hello, again = user(f"Hello, {name}."), user("And now?")
            said = talk.ask(hello)
            talk.ask(hello, said, again)
            talk.ask(hello, {"role": "assistant", "content": "Nothing of the kind."}, again)
            talk.ask(hello, {"role": "assistant", "content": said["content"][:3]}, again)
            talk.ask(hello, said, again, tool="see")
        update = {"model_path": str(later), "weight_version": "later"}
        assert engine.post("/update_weights_from_disk", update).json()["success"]
        Talk(house, "late").ask(user("Hello, late."))
    rewards.append(run, {"one": 1.0, "two": 0.0, "late": 0.5})
    merge.merge(run, folder / "merged", merge.Options(workers=1), lambda *_: None)
    return Recorded(folder / "merged", model, later)


@pytest.fixture(scope="module")
def gaps(recorded: Recorded) -> list[Gap]:
    """The gap of what the first weights sampled, of all batches."""
    return measure(recorded.batches, recorded.model, version="default")


def by_edge(gaps: list[Gap]) -> dict[str, Gap]:
    """The lines of a measurement by their names."""
    return {one.edge: one for one in gaps}


def sampled(recorded: Recorded, version: str) -> int:
    """The trained tokens of a version, counted in the batch."""
    rows = pq.read_table(recorded.batches, columns=["versions"])["versions"].to_pylist()
    return sum(row.count(version) for row in rows)


def test_every_kind_of_edge_agrees_in_float32(gaps: list[Gap]):
    """On fresh samples of the embedded engine each kind of edge stays below 1e-4, the largest token included."""
    assert [one.edge for one in gaps] == [*KINDS, ALL]
    assert {one.edge: one.max for one in gaps if not one.max < LIMIT} == {}
    check(gaps, LIMIT)


def test_every_trained_token_is_on_one_line(recorded: Recorded, gaps: list[Gap]):
    """The tokens of the edges add up to all, and those are the ones that the version sampled."""
    *kinds, last = gaps
    assert (last.edge, sum(one.tokens for one in kinds)) == (ALL, last.tokens)
    assert last.tokens == sampled(recorded, "default")


def test_a_merged_folder_is_measured_as_its_batches(recorded: Recorded, gaps: list[Gap]):
    """Where all sessions are rewarded, the trajectories hold the same tokens, and the same numbers come out."""
    of_merged = measure(recorded.merged, recorded.model, version="default")
    assert [(one.edge, one.tokens) for one in of_merged] == [(one.edge, one.tokens) for one in gaps]
    assert of_merged[-1].max == pytest.approx(gaps[-1].max, abs=1e-5)


def test_each_version_is_compared_with_its_own_model(recorded: Recorded):
    """The tokens of the later weights are those of the one session that they sampled, and they agree with them."""
    (first, last) = measure(recorded.batches, recorded.later, version="later")
    assert (first.edge, last.tokens) == ("root(first)", sampled(recorded, "later"))
    assert last.max < LIMIT


def test_figures_are_those_of_plain_forwards(recorded: Recorded):
    """Mean, 99th percentile and maximum of one edge, from a float32 forward of each whole trajectory by itself."""
    model = AutoModelForCausalLM.from_pretrained(recorded.later, dtype=torch.float32).eval()
    off: list[np.ndarray] = []
    for row in pq.read_table(recorded.merged / "trajectories").to_pylist():
        if row["edges"][-1] != "exact":
            continue
        start = row["call_starts"][-1]
        with torch.inference_mode():
            logits = model(torch.tensor([row["input_ids"]])).logits[0, start - 1 : -1] / 0.8
        given = logits.log_softmax(-1).gather(1, torch.tensor(row["input_ids"][start:])[:, None])[:, 0].numpy()
        off.append(np.abs(given - np.array(row["logprobs"][start:], np.float32)))
    got = by_edge(measure(recorded.batches, recorded.later, version="default"))["exact"]
    plain = np.concatenate(off)
    assert got.tokens == len(plain)
    assert (got.mean, got.p99, got.max) == pytest.approx(
        (plain.mean(), np.quantile(plain, 0.99), plain.max()), rel=1e-3
    )


def test_other_weights_are_told(recorded: Recorded):
    """The control: the later model did not sample the earlier tokens, and the sentence names the edges."""
    with pytest.raises(Disagreement, match=r"disagree by up to .*exact, inside\(n\), root\(first\)"):
        check(measure(recorded.batches, recorded.later, version="default"), LIMIT)


def test_a_gap_that_is_no_number_is_no_agreement():
    """NaN is not below a limit."""
    with pytest.raises(Disagreement, match="exact"):
        check([Gap("exact", 1, float("nan"), float("nan"), float("nan")), Gap(ALL, 1, 0.0, 0.0, 0.0)], LIMIT)


def test_the_version_must_be_said_where_several_sampled(recorded: Recorded):
    """One model cannot be held against the samples of two."""
    with pytest.raises(BadInput, match="'default', 'later' sampled here"):
        measure(recorded.batches, recorded.model)
    with pytest.raises(BadInput, match="'elsewhere' sampled no token"):
        measure(recorded.batches, recorded.model, version="elsewhere")


def test_without_a_merged_folder_edges_are_not_told(recorded: Recorded, tmp_path: Path):
    """A batch that lies alone has one line for all of its tokens; with the folder named it has them all again."""
    (alone,) = recorded.batches.iterdir()
    batch = tmp_path / "batch.parquet"
    batch.write_bytes(alone.read_bytes())
    assert [one.edge for one in measure(batch, recorded.model, version="default")] == [UNTOLD, ALL]
    told = measure(batch, recorded.model, merged=recorded.merged, version="default")
    assert [one.edge for one in told] == [*KINDS, ALL]


def test_the_merged_folder_of_another_batch_is_refused(recorded: Recorded, write: Any, draw: Any):
    """Trajectories that it does not know are named."""
    with pytest.raises(BadInput, match="trajectory 't0' is not in the merged folder"):
        measure(write(draw(40)), recorded.model, merged=recorded.merged)


def test_the_batch_of_another_model_is_refused(recorded: Recorded, tiny_model: Path):
    """Ids beyond the vocabulary are a sentence."""
    with pytest.raises(BadInput, match=r"the vocabulary of the model at .* has 320"):
        measure(recorded.batches, tiny_model, version="default")


def test_a_model_that_cannot_be_cut_is_compared_too(sliding_model: Path, write: Any, draw: Any):
    """Sliding windows fall back to whole trajectories; random logprobs are far away."""
    (_, last) = measure(write(draw(90, 80)), sliding_model)
    assert last.max > LIMIT


def test_progress_is_told(recorded: Recorded):
    """After each forest, up to what was planned."""
    seen: list[tuple[int, int]] = []
    measure(recorded.batches, recorded.model, version="default", advance=lambda *at: seen.append(at))
    assert seen == [(1, 1)]


def test_the_command_prints_the_table_and_fails_above_the_limit(recorded: Recorded):
    """Exit code 0 below the limit, 3 above it, and both times the figures."""
    given = ["gap", str(recorded.batches), "--model", str(recorded.model), "--version", "default", "--threads", "1"]
    good, bad = (CliRunner().invoke(app, [*given, *more], env={"COLUMNS": "200"}) for more in ([], ["--limit", "0"]))
    assert (good.exit_code, bad.exit_code) == (0, 3), (good.output, bad.output)
    for kind in [*KINDS, ALL]:
        assert kind in good.output
        assert kind in bad.output
    assert "disagree by up to" in bad.output
