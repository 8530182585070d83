"""The running batch: who is computed when, what is shared, and what ends it."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from polar_train.kv import load_model
from polar_train.sampling import Chooser, Params
from polar_train.scheduler import CHUNK, Finished, Prefilled, Scheduler, Sequence, Token

LENGTH = {"type": "length", "length": 5}


@pytest.fixture
def scheduler(tiny_model) -> Iterator[Scheduler]:
    scheduler = Scheduler(load_model(tiny_model), "v1", max_batch=2, cache_tokens=4000)
    yield scheduler
    scheduler.close()


class Heard:
    """A sequence and what it was told."""

    def __init__(self, prompt: np.ndarray, room: int = 5, *, rid: str = "r", start: int | None = None, stop: int = -1):
        self.events: SimpleQueue = SimpleQueue()
        self.prompt = prompt
        self.sequence = Sequence(
            rid=rid,
            params=Params(temperature=0),
            prompt=prompt,
            room=room,
            chooser=Chooser(Params(temperature=0), None),
            emit=self.events.put,
            stopped_by=lambda output: stop if output[-1] == stop else None,
            logprob_start=start,
        )

    def until(self, kind: type) -> list:
        """The events up to the first of a kind."""
        seen = [self.events.get(timeout=60)]
        while not isinstance(seen[-1], kind):
            seen.append(self.events.get(timeout=60))
        return seen

    def end(self) -> tuple[Prefilled, list[Token], Finished]:
        prefilled, *tokens, finished = self.until(Finished)
        return prefilled, tokens, finished


def prompt(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.int32)


def run(scheduler: Scheduler, *heard: Heard) -> list[tuple[Prefilled, list[Token], Finished]]:
    for one in heard:
        scheduler.submit(one.sequence)
    return [one.end() for one in heard]


def test_a_sequence_is_told_its_prefill_its_tokens_and_its_end(scheduler):
    """The events come in that order, each token with its version."""
    [(prefilled, tokens, finished)] = run(scheduler, Heard(prompt(9)))
    assert prefilled == Prefilled(0, ())
    assert [token.version for token in tokens] == ["v1"] * 5
    assert finished == Finished(LENGTH)


def test_more_sequences_than_the_batch_holds_wait_their_turn(scheduler):
    """Five sequences on a batch of two all end, with the tokens that each gets alone."""
    together = run(scheduler, *(Heard(prompt(5 + seed, seed)) for seed in range(5)))
    alone = [run(scheduler, Heard(prompt(5 + seed, seed)))[0] for seed in range(5)]
    assert [[t.id for t in one[1]] for one in together] == [[t.id for t in one[1]] for one in alone]


def test_a_prompt_longer_than_a_chunk_is_computed_in_pieces(scheduler, tiny_model):
    """The logprobs after a prompt of several chunks are those of a plain forward, and so are the prompt's own."""
    heard = Heard(prompt(2 * CHUNK + 77), start=CHUNK - 3)
    [(prefilled, tokens, _)] = run(scheduler, heard)
    ids = torch.tensor([*heard.prompt.tolist(), *(token.id for token in tokens)])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)(ids[None]).logits[0, :-1]
    wanted = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    found = torch.tensor([*prefilled.input_logprobs, *(token.logprob for token in tokens)])
    torch.testing.assert_close(found, wanted[CHUNK - 3 :], atol=1e-4, rtol=0)


def test_sequences_that_begin_alike_are_computed_once_even_when_they_start_together(scheduler):
    """The second of two long prompts waits for the first and copies what they share."""
    shared = prompt(200)
    first, second = (Heard(np.concatenate([shared, prompt(10, seed)])) for seed in (1, 2))
    told = run(scheduler, first, second)
    assert [prefilled.cached_tokens for prefilled, _, _ in told] == [0, 200]


def test_prompt_logprobs_are_not_taken_from_the_cache(scheduler):
    """A prefix is shared only up to the position where logprobs begin."""
    run(scheduler, Heard(prompt(50)))
    [(prefilled, _, _)] = run(scheduler, Heard(prompt(50), start=20))
    assert (prefilled.cached_tokens, len(prefilled.input_logprobs)) == (20, 29)


def test_no_room_means_no_token(scheduler):
    """With nothing to sample the prompt is computed and the sequence ends."""
    assert run(scheduler, Heard(prompt(9), 0, start=0))[0][1:] == ([], Finished({"type": "length", "length": 0}))


def test_a_full_output_is_a_length_even_when_it_stops(scheduler):
    """SGLang looks at the length first: a stop token in the last place is a length ending."""
    [(_, tokens, _)] = run(scheduler, Heard(prompt(9)))
    ids = [token.id for token in tokens]
    stop = ids[4] if ids[4] not in ids[:4] else 999
    assert run(scheduler, Heard(prompt(9), stop=stop))[0][2] == Finished(LENGTH)


def test_a_stop_ends_a_sequence(scheduler):
    """The stop token is the last one told."""
    [(_, tokens, _)] = run(scheduler, Heard(prompt(9)))
    [(_, fewer, finished)] = run(scheduler, Heard(prompt(9), stop=tokens[0].id))
    assert ([token.id for token in fewer], finished.reason["matched"]) == ([tokens[0].id], tokens[0].id)


def test_an_abort_matches_the_beginning_of_a_rid(scheduler):
    """As in SGLang, aborting r1 ends r1 and r10, running or waiting, and leaves r2."""
    heard = [Heard(prompt(9, seed), 3000, rid=rid) for seed, rid in enumerate(("r1", "r10", "r2"))]
    for one in heard:
        scheduler.submit(one.sequence)
    heard[0].until(Token)
    scheduler.abort("r1")
    assert [one.until(Finished)[-1].reason["type"] for one in heard[:2]] == ["abort", "abort"]
    heard[2].until(Token)
    scheduler.abort("")
    assert heard[2].until(Finished)[-1].reason["message"] == "Aborted"


def test_new_weights_wait_for_what_runs(scheduler, tiny_model):
    """Without a pause a sequence ends under the weights it began with, and the next one has the new ones."""
    running = Heard(prompt(9), 60)
    scheduler.submit(running.sequence)
    running.until(Prefilled)
    swapped = scheduler.swap(load_model(tiny_model), "v2", abort=False)
    assert {event.version for event in running.until(Finished)[:-1]} == {"v1"}
    swapped.result(60)
    assert {token.version for token in run(scheduler, Heard(prompt(9)))[0][1]} == {"v2"}


def test_new_weights_with_abort_do_not_wait(scheduler, tiny_model):
    """abort ends what runs, and the swap happens at once."""
    running = Heard(prompt(9), 3000)
    scheduler.submit(running.sequence)
    running.until(Token)
    scheduler.swap(load_model(tiny_model), "v2", abort=True).result(60)
    assert running.until(Finished)[-1].reason["type"] == "abort"
    assert scheduler.version == "v2"


def test_a_paused_sequence_goes_on_with_new_weights_from_where_it_was(scheduler, tiny_model):
    """Its tokens carry two versions, and it says that it was computed anew."""
    running = Heard(prompt(9), 40)
    scheduler.submit(running.sequence)
    seen = running.until(Token)
    scheduler.pause("retract").result(60)
    scheduler.swap(load_model(tiny_model), "v2", abort=False).result(60)
    scheduler.resume().result(60)
    *seen, finished = seen + running.until(Finished)
    versions = [event.version for event in seen if isinstance(event, Token)]
    assert (len(versions), versions[0], versions[-1], finished.retractions) == (40, "v1", "v2", 1)


def test_pausing_with_abort_ends_what_runs(scheduler):
    """The default mode of a pause leaves nothing behind."""
    running = Heard(prompt(9), 3000)
    scheduler.submit(running.sequence)
    running.until(Token)
    scheduler.pause("abort").result(60)
    assert running.until(Finished)[-1].reason["type"] == "abort"


def test_the_cache_is_flushed_only_when_nothing_runs(scheduler):
    """Flushing under a running sequence is refused; an idle flush forgets the prefixes."""
    running = Heard(prompt(9), 3000)
    scheduler.submit(running.sequence)
    running.until(Token)
    assert scheduler.flush().result(60) is False
    scheduler.abort("")
    running.until(Finished)
    assert scheduler.flush().result(60) is True
    assert run(scheduler, Heard(prompt(9)))[0][0].cached_tokens == 0


def test_closing_aborts_what_runs(scheduler):
    """Nobody waits for an engine that has ended."""
    running = Heard(prompt(9), 3000)
    scheduler.submit(running.sequence)
    running.until(Token)
    scheduler.close()
    assert running.until(Finished)[-1].reason["type"] == "abort"
    assert not scheduler.alive
