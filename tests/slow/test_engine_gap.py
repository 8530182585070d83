"""The logprobs of both engines against the trainer's, by edge, on the sessions of a real harness and on edits of them.

Pi asks SmolLM2-135M-Instruct through mitmdump and goes on in a second process; then its last request comes again with
another question in its history, with its reply cut short, and with another system prompt. Float32, on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from polar_toolkit import merge
from polar_train.gap import ALL, Gap, check, measure
from tests.bench.interception import Interception, interception
from tests.harness.performance import TASK, Json, completed, request_body
from tests.sglang.server import embedded, sglang

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIMIT = 1e-4
ENGINES = {"embedded": embedded, "sglang": sglang}
SAMPLING = json.dumps({"temperature": 0.8, "max_new_tokens": 64, "seed": 3})


@dataclass(frozen=True, slots=True)
class Measured:
    """What an engine sampled, and how far the trainer is from it."""

    engine: str
    rows: list[Json]
    gaps: dict[str, Gap]


@pytest.fixture(scope="module", params=ENGINES)
def measured(request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Two runs of Pi in one conversation, and three edits of it, sampled by one engine."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    with interception(folder, []) as bench, ExitStack() as stack:
        with bench.namespace.entered():
            url = stack.enter_context(ENGINES[request.param](smollm2, folder / "engine.log"))
        with bench.proxy(polar_engine=url, polar_tokenizer=str(smollm2), polar_sampling=SAMPLING):
            session = _answered(bench)
            bench.perform("pi", "resumed-openai", "Thanks. Is it there?", session=session)
            rows = [row for row in completed(bench.run) if row["session_id"] == session]
            for change in (with_another_question, with_the_reply_cut, with_another_system_prompt):
                _again(bench, rows, change)
            merged = folder / "merged"
            merge.merge(bench.run, merged, merge.Options(workers=1), lambda *_: None)
            gaps = {one.edge: one for one in measure(merged, smollm2)}
            for one in gaps.values():
                print(f"{request.param} {one}")
            return Measured(request.param, completed(bench.run), gaps)


def _answered(bench: Interception) -> str:
    """A session whose first reply ended by itself: Pi 1.6.0 leaves one that was cut off out of its history."""
    for number in range(8):
        done = bench.perform("pi", "openai", TASK, session=f"s{number}")
        rows = completed(bench.run)
        assert rows, done.output
        if rows[-1]["finish"] == "stop" and len(json.loads(rows[-1]["reply"])[-1].get("text", "")) > 20:
            return f"s{number}"
    pytest.fail("the model spoke to no end in 8 sessions", pytrace=False)


def _again(bench: Interception, rows: list[Json], change: Callable[[Json, Json], Json]) -> None:
    """The harness's last request, changed; `change` is told the first call."""
    first, last = rows[0], rows[-1]
    body = change(request_body(rows, last["call_id"]), first)
    headers = {"user-agent": last["user_agent"]}
    answer = bench.ask(f"https://{last['host']}{last['path']}", session=last["session_id"], body=body, headers=headers)
    assert answer.status_code == 200, answer.text


def with_another_question(body: Json, _first: Json) -> Json:
    """The same request, but another task was asked for at first."""
    return _replaced(body, TASK, "Write nothing at all.")


def with_the_reply_cut(body: Json, first: Json) -> Json:
    """The same request, but of the first reply only the first half of its text."""
    text: str = json.loads(first["reply"])[-1]["text"]
    return _replaced(body, text, text[: len(text) // 2])


def with_another_system_prompt(body: Json, _first: Json) -> Json:
    """The same request, but the harness says of itself something else."""
    return _replaced(body, "You are ", "You were ")


def _replaced(body: Json, old: str, new: str) -> Json:
    old, new = (json.dumps(text, ensure_ascii=False)[1:-1] for text in (old, new))
    written = json.dumps(body, ensure_ascii=False)
    assert old in written, old
    return json.loads(written.replace(old, new))


def test_every_kind_of_edge_agrees_in_float32(measured: Measured):
    """The largest gap of a token is below 1e-4, whatever its call's prompt did with the calls before it."""
    assert {"exact", "inside(n)", "root(first)", "root(edited_history)"} <= measured.gaps.keys()
    check([*measured.gaps.values()], LIMIT)


def test_every_sampled_token_was_compared(measured: Measured):
    """Nothing that the engine sampled is left out."""
    assert measured.gaps[ALL].tokens == sum(len(row["output_ids"]) for row in measured.rows)
