"""What interception costs: the whole proxy against the engine called directly and against mitmproxy's canned answer.

Prints a table of ratios, medians of interleaved rounds, each with its limit and whether it was met, and the CPU of a
plain call split by stage. `--only WORD` runs the measures whose names hold a word. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import statistics
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from benchmarks.stage.figures import Figure, show
from benchmarks.stage.load import Answer, Client, together
from benchmarks.stage.processes import Process, canned, engine, interceptor
from benchmarks.stage.split import split
from polar_mitm.conversation import Message, Role, Text
from polar_mitm.journal import Journal
from polar_mitm.options import OPTIONS
from polar_mitm.tokens import load
from polar_train.small_models import fetch

ROUNDS = 3
PACE = 0.02
CHAT = "/v1/chat/completions"
_WORD = b"word"


def chat(tokens: int, *, stream: bool = False, text: str = "Hi") -> dict[str, Any]:  # Any: JSON
    """A Chat Completions request for exactly this many tokens."""
    return {"model": "any", "stream": stream, "max_tokens": tokens, "messages": [{"role": "user", "content": text}]}


def generate(tokens: int) -> dict[str, Any]:  # Any: JSON
    """The same of the engine, in pieces of 50 ms."""
    sampling = {"max_new_tokens": tokens, "stream_interval": max(1, round(0.05 / PACE))}
    return {"input_ids": [9707, 13048], "return_logprob": True, "stream": True, "sampling_params": sampling}


@contextmanager
def proxied(pace: float = 0.0, *, cumulative: bool = False) -> Generator[tuple[Process, Process]]:
    """A word engine and an interceptor in front of it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        words = stack.enter_context(engine(pace, cumulative=cumulative))
        proxy = stack.enter_context(interceptor(folder, words))
        asyncio.run(_calls(proxy, 1, 2, chat(2)))  # the first call of a process pays for imports
        yield words, proxy


async def _calls(proxy: Process, parallel: int, calls: int, body: dict[str, Any]) -> tuple[float, list[Answer]]:
    async def post(client: Client, _: int) -> Answer:
        return await client.post(CHAT, body, marker=_WORD)

    return await together(parallel, calls, lambda: Client.through(proxy), post)


async def _direct(words: Process, parallel: int, calls: int, tokens: int) -> tuple[float, list[Answer]]:
    async def post(client: Client, _: int) -> Answer:
        return await client.post("/generate", generate(tokens), marker=b"data")  # its first piece holds a token

    return await together(parallel, calls, lambda: Client.straight(words), post)


# --- the measures -------------------------------------------------------------------------------------------------


def plain() -> Iterator[Figure]:
    """Plain 50-token replies, 16 at a time, against the canned answer of the same mitmdump."""
    calls = 320
    with proxied() as (words, proxy), tempfile.TemporaryDirectory() as folder, canned(Path(folder)) as peer:
        rates: list[tuple[float, float]] = []
        costs: list[tuple[float, float]] = []
        asyncio.run(_calls(peer, 16, 32, chat(50)))
        for _ in range(ROUNDS):
            before = peer.cpu(), proxy.cpu()
            seconds = tuple(asyncio.run(_calls(which, 16, calls, chat(50)))[0] for which in (peer, proxy))
            rates.append((calls / seconds[0], calls / seconds[1]))
            costs.append(((peer.cpu() - before[0]) / calls, (proxy.cpu() - before[1]) / calls))
        stages = split(words, chat(50), 50)
    canned_rate, rate = _medians(rates)
    canned_cost, cost = _medians(costs)
    yield Figure("plain, c=16: requests/s", rate / canned_rate, 0.3, "x canned", f"{canned_rate:.0f}/s", least=True)
    yield Figure("plain, c=16: CPU a request", cost / canned_cost, 4, "x canned", f"{canned_cost * 1e3:.1f} ms")
    stages = {"proxy": canned_cost * 1e3} | stages
    stages["the rest"] = cost * 1e3 - sum(stages.values())
    for stage, spent in stages.items():
        yield Figure(f"  of it, {stage}", spent, None, "ms CPU a request")


def streamed() -> Iterator[Figure]:
    """Streams of 50 tokens at 20 ms against the engine's own."""
    with proxied(PACE) as (words, proxy):
        for parallel, limit in ((16, 1.05), (64, 1.2)):
            pairs: list[tuple[float, float]] = []
            for _ in range(ROUNDS):
                direct = asyncio.run(_direct(words, parallel, parallel, 50))[1]
                through = asyncio.run(_calls(proxy, parallel, parallel, chat(50, stream=True)))[1]
                pairs.append((_middle(a.total for a in direct), _middle(a.total for a in through)))
            alone, ours = _medians(pairs)
            yield Figure(
                f"streamed, c={parallel}: total time", ours / alone, limit, "x direct", f"{alone * 1e3:.0f} ms"
            )


def first_token() -> Iterator[Figure]:
    """What a lone call waits longer for its first token."""
    with proxied(PACE) as (words, proxy):
        pairs: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            direct = asyncio.run(_direct(words, 1, 10, 5))[1]
            through = asyncio.run(_calls(proxy, 1, 10, chat(5, stream=True)))[1]
            pairs.append((_middle(a.first for a in direct), _middle(a.first for a in through)))
        alone, ours = _medians(pairs)
        yield Figure("first content token, lone call", (ours - alone) * 1e3, 15, "ms more", f"{alone * 1e3:.0f} ms")


def long_stream() -> Iterator[Figure]:
    """CPU of one streamed reply of 500 tokens at 20 ms; and how much more the engine sends than the final answer."""
    with proxied(PACE) as (_, proxy):
        costs: list[float] = []
        for _ in range(ROUNDS):
            before = proxy.cpu()
            asyncio.run(_calls(proxy, 4, 4, chat(500, stream=True)))
            costs.append((proxy.cpu() - before) / 4)
        yield Figure("streamed, 500 tokens: CPU", statistics.median(costs) * 1e3, 60, "ms")
    for cumulative in (False, True):
        with proxied(PACE / 10, cumulative=cumulative) as (words, proxy):  # at no pace at all it is one piece
            for tokens in (500, 8000):
                before = _counters(words)
                asyncio.run(_calls(proxy, 1, 1, chat(tokens, stream=True)))
                sent, final = (after - b for after, b in zip(_counters(words), before, strict=True))
                kind = "cumulative" if cumulative else "incremental"
                yield Figure(f"engine bytes, {tokens} tokens, {kind}", sent / final, 20, "x final answer")


def multiplexed() -> Iterator[Figure]:
    """16 calls on one HTTP/2 connection against one call on it."""
    with proxied(PACE) as (_, proxy):
        pairs: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            pairs.append(asyncio.run(_http2(proxy)))
        one, sixteen = _medians(pairs)
        yield Figure("16 calls on one HTTP/2 connection", sixteen / one, 1.5, "x one call", f"{one * 1e3:.0f} ms")


class _OnlyHTTP2(ssl.SSLContext):
    """httpx offers HTTP/1.1 first, and mitmproxy takes what is offered first."""

    def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:
        """Offer HTTP/2 alone."""
        super().set_alpn_protocols(["h2"])


async def _http2(proxy: Process) -> tuple[float, float]:
    url = f"https://api.openai.com{CHAT}"
    trust = _OnlyHTTP2(ssl.PROTOCOL_TLS_CLIENT)
    trust.load_verify_locations(str(proxy.ca))
    where = f"http://127.0.0.1:{proxy.port}"
    async with httpx.AsyncClient(http2=True, proxy=where, verify=trust, timeout=60, trust_env=False) as client:

        async def timed(calls: int) -> float:
            began = time.perf_counter()
            answers = await asyncio.gather(*(client.post(url, json=chat(50)) for _ in range(calls)))
            assert {(a.status_code, a.http_version) for a in answers} == {(200, "HTTP/2")}, answers
            return time.perf_counter() - began

        await timed(1)
        return await timed(1), await timed(16)


def long_session() -> Iterator[Figure]:
    """Turns 41 to 50 of a session that grows to 30,000 tokens, against rendering that history anew."""
    template = load(fetch("qwen3-tokenizer"))
    with proxied() as (_, proxy):
        history, cost = asyncio.run(_long_session(proxy))
    roles: tuple[Role, ...] = ("user", "assistant")
    messages = tuple(Message(roles[i % 2], (Text(m["content"]),)) for i, m in enumerate(history))
    length = len(template.render(messages, ()))
    spent: list[float] = []
    for _ in range(ROUNDS):
        before = time.process_time()
        template.render(messages, ())
        spent.append(time.process_time() - before)
    anew = statistics.median(spent)
    yield Figure(f"turn 50, {length:,} tokens: CPU a call", cost / anew, 0.25, "x re-render", f"{anew * 1e3:.0f} ms")


async def _long_session(proxy: Process) -> tuple[list[dict[str, str]], float]:
    client = await Client.through(proxy)
    history: list[dict[str, str]] = []
    before = 0.0
    for turn in range(50):
        history.append({"role": "user", "content": f"Turn {turn}: " + "look at what this file says. " * 80})
        before = proxy.cpu() if turn == 40 else before
        body = chat(50) | {"messages": history}
        answer = json.loads((await client.post(CHAT, body)).body)
        history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    client.close()
    return history[:-1], (proxy.cpu() - before) / 10


def memory() -> Iterator[Figure]:
    """10,000 calls over 200 sessions of 50 turns; then 16 requests of 5 MB at once."""
    with proxied() as (_, proxy):
        before = proxy.memory()
        asyncio.run(together(16, 200, lambda: Client.through(proxy), _session))
        grown, budget = proxy.memory() - before, next(o[2] for o in OPTIONS if o[0] == "polar_memory")
        yield Figure("10,000 calls, 200 sessions: memory", grown, budget, "MB more", f"{before:.0f} MB, polar_memory")
    with proxied() as (_, proxy):
        proxy.forget_peak()
        asyncio.run(_calls(proxy, 16, 16, chat(5, text="five mb " * 655_360)))
        yield Figure("16 requests of 5 MB: peak memory", proxy.memory("VmHWM"), 600, "MB")


async def _session(client: Client, number: int) -> Answer:
    history: list[dict[str, str]] = []
    answers: list[Answer] = []
    for turn in range(50):
        history.append({"role": "user", "content": f"Session {number}, turn {turn}: and what does the next file say?"})
        answers.append(await client.post(CHAT, chat(20) | {"messages": history}))
        text = json.loads(answers[-1].body)["choices"][0]["message"]["content"]
        history.append({"role": "assistant", "content": text})
    return answers[-1]


def commits() -> Iterator[Figure]:
    """How long a finished call waits until it is durable, at 100 calls a second."""
    waits = asyncio.run(_commits())
    yield Figure("commit at 100 calls/s, p50", float(np.percentile(waits, 50)) * 1e3, None, "ms")
    yield Figure("commit at 100 calls/s, p99", float(np.percentile(waits, 99)) * 1e3, None, "ms")


async def _commits() -> list[float]:
    waits: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal.open(Path(folder) / "run")

        async def commit(number: int) -> None:
            await asyncio.sleep(number / 100)
            ids = np.arange(500, dtype=np.int32)
            begun = journal.begin({"call_id": str(number), "prompt_suffix": ids})
            began = time.perf_counter()
            await journal.finish([begun | {"status": "completed", "output_ids": ids}])
            waits.append(time.perf_counter() - began)

        await asyncio.gather(*(commit(number) for number in range(500)))
        await journal.close()
    return waits


def many_streams() -> Iterator[Figure]:
    """256 open streams on one process."""
    with proxied(PACE) as (words, proxy):
        direct = asyncio.run(_direct(words, 256, 256, 50))[1]
        through = asyncio.run(_calls(proxy, 256, 256, chat(50, stream=True)))[1]
    added = (_late(through) - _late(direct)) * 1e3
    yield Figure("256 streams: first content token, p99", added, None, "ms more", f"{_late(direct) * 1e3:.0f} ms")
    missed = sum(not answer.body.rstrip().endswith(b"data: [DONE]") for answer in through)
    yield Figure("256 streams: missed terminal events", missed, 0, "streams")


# --- figures ------------------------------------------------------------------------------------------------------


def _medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    a, b = zip(*pairs, strict=True)
    return statistics.median(a), statistics.median(b)


def _middle(values: Iterator[float]) -> float:
    return statistics.median(values)


def _late(answers: list[Answer]) -> float:
    return float(np.percentile([a.first for a in answers], 99))


def _counters(words: Process) -> tuple[float, float]:
    counted = httpx.get(f"http://127.0.0.1:{words.port}/counters", trust_env=False).json()
    return counted["sent"], counted["final"]


MEASURES = (plain, streamed, first_token, long_stream, multiplexed, long_session, memory, commits, many_streams)


def main() -> None:
    """Run the measures and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the measures whose names hold this word")
    only = parser.parse_args().only
    measures = [(f"{m.__name__}: {m.__doc__}", m) for m in MEASURES if only in m.__name__]
    show("What interception costs", measures, Console())


if __name__ == "__main__":
    main()
