"""A push to two embedded engines is all or nothing, whatever one of them does."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.responses import JSONResponse

from polar_mitm.engine import Sample, SGLang
from polar_train.engines import push
from polar_train.errors import BadInput, PushFailed
from polar_train.model import load
from polar_train.weights import checkpoint_logprobs, save_checkpoint
from tests.train.engine_sets import Running, running

IDS = np.arange(40, 70, dtype=np.int32)
UPDATE = "/update_weights_from_disk"
ROOM = 300
"""Tokens of a stream that a push interrupts."""

Start = Callable[..., Running]


@pytest.fixture
def start(tiny_model) -> Iterator[Start]:
    """Starts engines on the tiny model, and ends them afterwards."""
    with ExitStack() as stack:
        yield lambda habit=None, folder=tiny_model: stack.enter_context(running(folder, habit))


@pytest.fixture
def changed(tiny_model, tmp_path) -> Callable[[str], Path]:
    """Writes checkpoints of the tiny model with every weight a little different, each in its own way."""

    def make(name: str) -> Path:
        model = load(tiny_model, torch.device("cpu"))
        generator = torch.Generator().manual_seed(len(name) + sum(name.encode()))
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(3e-2 * torch.randn(weight.shape, generator=generator))
        save_checkpoint(model, tiny_model, tmp_path / name, {"loss": 0.5})
        return tmp_path / name

    return make


def serves(engine: Running, folder: Path) -> bool:
    """Whether an engine answers with the logprobs of a folder."""
    return bool(np.abs(engine.logprobs(IDS) - checkpoint_logprobs(folder, IDS)).max() < 1e-4)


def once(path: str, act: Callable[[Running, dict[str, Any]], Any]) -> Callable[..., Any]:
    """A habit that acts on the first request for a path only."""
    left = [path]

    def habit(engine: Running, asked: str, body: dict[str, Any]) -> Any:
        return act(engine, body) if asked in left and not left.clear() else None

    return habit


def refuse(_engine: Running, _body: dict[str, Any]) -> JSONResponse:
    return JSONResponse({"success": False, "message": "no such folder"}, status_code=400)


def die(engine: Running, _body: dict[str, Any]) -> None:
    engine.die()


def loading(folder: Path) -> Callable[..., dict[str, Any]]:
    """Has an engine load another folder than it is told."""
    return lambda _engine, body: body | {"model_path": str(folder)}


# ----------------------------------------------------------------------------------------------------------- success


def test_all_engines_serve_the_checkpoint(start, changed):
    """Both name the version, give the checkpoint's logprobs, and hold none of the old tensors but equal ones."""
    new, engines = changed("new"), [start(), start()]
    pushed = push(new, [engine.url for engine in engines], "v2")
    assert [(one.url, one.version_before, one.version_after) for one in pushed.each] == [
        (engine.url, "default", "v2") for engine in engines
    ]
    assert all(one.changed == one.tensors == 24 and one.disagreement < 1e-4 and one.tokens > 50 for one in pushed.each)
    assert all(serves(engine, new) for engine in engines)


def test_nothing_is_sampled_between_the_first_changed_weight_and_the_last_check(start, changed):
    """Each engine is paused, loaded and looked at before the first one goes on, and asked for a sample only then."""
    order: list[str] = []

    def note(_engine: Running, path: str, _body: dict[str, Any]) -> None:
        order.append(path)

    push(changed("new"), [start(note).url, start(note).url], "v2")
    steps = ("/pause_generation", UPDATE, "/continue_generation", "/generate")
    places = {step: [i for i, path in enumerate(order) if path == step] for step in (*steps, "/weights_checker")}
    for step, then in pairwise(steps):
        assert max(places[step]) < min(places[then])
    checks = places["/weights_checker"][-2:]
    assert max(places[UPDATE]) < min(checks) < max(checks) < min(places["/continue_generation"])


def test_idle_seconds_run_from_the_first_pause_to_the_last_continue(start, changed):
    """They are part of the time that the push took, and not nothing."""
    began = time.monotonic()
    pushed = push(changed("new"), [start().url, start().url], "v2")
    assert 0 < pushed.idle_s < time.monotonic() - began


def test_a_relative_checkpoint_reaches_the_engines_as_an_absolute_path(start, changed, monkeypatch):
    """Engines run in folders of their own."""
    new, engine = changed("new"), start()
    monkeypatch.chdir(new.parent)
    push(Path(new.name), [engine.url], "v2")
    assert engine.held().folder == str(new)


def test_the_same_version_can_be_pushed_again(start, changed):
    """A trainer that starts again pushes what it pushed before: it is proven anew, and changes nothing."""
    new, urls = changed("new"), [start().url, start().url]
    push(new, urls, "v2")
    assert [one.changed for one in push(new, urls, "v2").each] == [0, 0]


def test_an_engine_named_twice_is_one(start, changed):
    """A slash behind the address makes no second engine."""
    url = start().url
    assert len(push(changed("new"), [url, f"{url}/"], "v2").each) == 1


def test_requests_go_on_over_a_push_and_say_which_weights_sampled_each_token(start, changed, tiny_model):
    """On both engines a stream that runs during the push ends whole, with the old version's tokens before the new's."""
    pausing, moving = threading.Event(), threading.Barrier(4, timeout=60)

    def while_streams_run(_engine: Running, _body: dict[str, Any]) -> None:
        pausing.set()
        moving.wait()

    new, engines = changed("new"), [start(once("/pause_generation", while_streams_run)) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        pushed = pool.submit(push, new, [engine.url for engine in engines], "v2")
        assert pausing.wait(60)
        for samples in pool.map(lambda engine: asyncio.run(stream(engine, moving)), engines):
            old, young = samples[-1].versions
            assert (old.version, old.start, young.version, young.start) == ("default", 0, "v2", old.end)
            ids = np.concatenate([IDS, *(sample.ids for sample in samples)]).astype(np.int32)
            logprobs = np.concatenate([sample.logprobs for sample in samples])
            assert len(logprobs) == young.end == ROOM
            before, after = (checkpoint_logprobs(folder, ids)[len(IDS) - 1 :] for folder in (tiny_model, new))
            assert np.abs(logprobs[: old.end] - before[: old.end]).max() < 1e-4
            assert np.abs(logprobs[old.end :] - after[old.end :]).max() < 1e-4
        pushed.result()


async def stream(engine: Running, moving: threading.Barrier) -> list[Sample]:
    """What the gateway's client reads of a generation of ROOM tokens; `moving` is met at the first of them."""
    client, samples = SGLang(engine.url), list[Sample]()
    try:
        async for sample in client.generate(IDS, {"max_new_tokens": ROOM, "ignore_eos": True}, "0" * 32):
            if not samples:
                await asyncio.to_thread(moving.wait)
            samples.append(sample)
    finally:
        await client.close()
    return samples


# ----------------------------------------------------------------------------------------- failures before the pause


def test_a_push_to_nobody_is_refused(changed):
    """There is no set without an engine."""
    with pytest.raises(BadInput, match="no engine to push to"):
        push(changed("new"), [], "v2")


def test_a_folder_that_is_no_checkpoint_never_reaches_an_engine(start, tmp_path):
    """It is refused before an engine is asked anything."""
    engine = start()
    with pytest.raises(BadInput, match="no checkpoint at"):
        push(tmp_path, [engine.url], "v2")
    assert engine.paths == []


def test_an_engine_that_is_not_there_leaves_the_others_alone(start, changed, tiny_model):
    """Its address is in the sentence; the other was asked what it holds, and no more."""
    engine = start()
    with pytest.raises(BadInput, match=r"nothing was pushed: .* no engine answers at 'http://127.0.0.1:1/model_info'"):
        push(changed("new"), [engine.url, "http://127.0.0.1:1"], "v2")
    assert set(engine.paths) == {"/model_info", "/weights_checker"}
    assert serves(engine, tiny_model)


def test_an_engine_that_cannot_show_its_weights_is_not_pushed_to(start, changed):
    """What it held while paused could not be known."""
    old = start(once("/weights_checker", lambda *_: JSONResponse({"detail": "Not Found"}, status_code=404)))
    with pytest.raises(PushFailed, match=r"nothing was pushed: .* answered /weights_checker with 404"):
        push(changed("new"), [start().url, old.url], "v2")
    assert UPDATE not in old.paths


# ------------------------------------------------------------------------------------------------ failures after it


def fails(engines: list[Running], new: Path, **options: Any) -> str:
    """What a push says that must fail."""
    with pytest.raises(PushFailed) as failure:
        push(new, [engine.url for engine in engines], "v2", **options)
    return str(failure.value)


def test_a_refusal_of_one_brings_the_old_weights_back_to_all(start, changed, tiny_model):
    """The sentence has the engine's words, and which weights each holds; all serve the old ones."""
    good, bad = start(), start(once(UPDATE, refuse))
    before = good.held()
    said = fails([good, bad], changed("new"))
    assert f"{bad.url}: it answered {UPDATE} with 400" in said
    assert "no such folder" in said
    assert f"The old weights are back and serve again ({good.url} holds 'default'; {bad.url} holds 'default')" in said
    assert (good.held(), serves(good, tiny_model), serves(bad, tiny_model)) == (before, True, True)


def test_an_engine_that_dies_during_the_update_is_left_out(start, changed, tiny_model):
    """The others serve their old weights again, and the sentence says who is gone."""
    good, dying = start(), start(once(UPDATE, die))
    said = fails([good, dying], changed("new"))
    assert f"{dying.url} is gone: no engine answers at" in said
    assert f"{good.url} holds 'default'" in said
    assert serves(good, tiny_model)


def test_an_engine_with_other_weights_than_the_rest_is_caught_while_all_are_paused(start, changed, tiny_model):
    """A wrong folder shows in the checksums: no engine sampled anything with the new weights."""
    good, wrong = start(), start(once(UPDATE, loading(changed("wrong"))))
    said = fails([good, wrong], changed("new"))
    assert f"{wrong.url}: 24 of its tensors are not those of {good.url}" in said
    assert "/generate" not in good.paths + wrong.paths
    assert serves(good, tiny_model)
    assert serves(wrong, tiny_model)


def test_an_engine_that_only_takes_the_name_is_caught_while_all_are_paused(start, changed, tiny_model):
    """Old weights under a new name are a failure, and get their old name back."""
    liar = start(once(UPDATE, loading(tiny_model)))
    assert "its weights are still those of 'default', or equal to them" in fails([start(), liar], changed("new"))
    assert liar.held().version == "default"


def test_an_engine_that_keeps_the_name_is_caught_while_all_are_paused(start, changed):
    """Calls would be recorded under the wrong version."""
    shy = start(once(UPDATE, lambda _engine, body: body | {"weight_version": "other"}))
    assert "it names its weights 'other', not 'v2'" in fails([start(), shy], changed("new"))


def test_wrong_weights_in_all_engines_are_caught_by_the_probe(start, changed, tiny_model):
    """They agree with each other and not with the checkpoint: what runs is aborted, and the old weights come back."""
    wrong = changed("wrong")
    engines = [start(once(UPDATE, loading(wrong))), start(once(UPDATE, loading(wrong)))]
    running, meets = threading.Event(), engines[0].habit

    def note(engine: Running, path: str, body: dict[str, Any]) -> Any:
        return running.set() if path == "/generate" else meets(engine, path, body)

    engines[0].habit = note
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(engines[0].generate, IDS.tolist(), max_new_tokens=4000, ignore_eos=True)
        assert running.wait(60)
        said = fails(engines, changed("new"))
        assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert said.count("it does not serve this checkpoint") == 2
    assert "The old weights are back" in said
    assert all(serves(engine, tiny_model) for engine in engines)


def test_a_set_that_cannot_go_back_stays_paused(start, changed, tiny_model, tmp_path):
    """Where the old folder is gone nothing is served; a push of weights that all can read frees the set."""
    old, new = shutil.copytree(tiny_model, tmp_path / "old"), changed("new")
    good, bad = start(folder=old), start(once(UPDATE, refuse), folder=old)
    shutil.rmtree(old)
    said = fails([good, bad], new)
    assert "All engines that answer stay paused" in said
    assert f"{good.url} did not take its old weights back" in said
    assert f"{bad.url} holds 'default'" in said
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(engine.generate, IDS.tolist(), max_new_tokens=2) for engine in (good, bad)]
        push(new, [good.url, bad.url], "v2")
        assert [one.result()["meta_info"]["weight_version"] for one in waiting] == ["v2", "v2"]


def test_the_old_weights_come_from_the_folder_that_is_given(start, changed, tiny_model, tmp_path):
    """`previous` counts more than what an engine says of itself, which may be gone."""
    old = shutil.copytree(tiny_model, tmp_path / "old")
    engines = [start(folder=old), start(once(UPDATE, refuse), folder=old)]
    shutil.rmtree(old)
    assert "The old weights are back" in fails(engines, changed("new"), previous=tiny_model)
    assert all(serves(engine, tiny_model) for engine in engines)


def test_another_folder_is_not_taken_for_the_old_weights(start, changed):
    """What comes back is held to the checksums from before."""
    said = fails([start(), start(once(UPDATE, refuse))], changed("new"), previous=changed("wrong"))
    assert "holds other weights than before under the name 'default'" in said
    assert "stay paused" in said


def test_a_set_that_was_mixed_before_does_not_serve_after_a_failure(start, changed):
    """Going back to weights that contradict each other is no way back."""
    other, third = start(), start(once(UPDATE, refuse))
    push(changed("odd"), [other.url], "v1")
    assert "stay paused" in fails([other, third], changed("new"))


def test_an_interrupted_push_goes_back(start, changed, tiny_model):
    """Ctrl-C during the update leaves the old weights serving."""
    engines = [start(), start(once(UPDATE, lambda *_: os.kill(os.getpid(), signal.SIGINT)))]
    with pytest.raises(KeyboardInterrupt):
        push(changed("new"), [engine.url for engine in engines], "v2")
    assert all(serves(engine, tiny_model) for engine in engines)
