"""An engine that says "word word word" at a given pace: SGLang's `/generate` at the least possible cost.

When asked to be varied, it says other words, each as likely as another, at a cost: for what ends up on disk.

Invariant: a reply has exactly `max_new_tokens` tokens, one every `pace` seconds, in pieces of `stream_interval` tokens
with the first token at once, as SGLang 0.5.23 sends them. It does not check what it is sent. Bare asyncio, because a
framework would cost as much as what is measured. `python -m benchmarks.stage.engine TOKENIZER` prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer

Json = dict[str, Any]  # Any: bodies of requests and answers
CONTEXT = 10_000_000


class Engine:
    """One server; see the module."""

    def __init__(self, tokenizer: Tokenizer, pace: float, *, cumulative: bool, varied: bool) -> None:
        self._tokenizer, self._pace, self._cumulative = tokenizer, pace, cumulative
        self._words = sorted(i for _, i in words(tokenizer)) if varied else []
        self._word = int(tokenizer.encode(" word", add_special_tokens=False).ids[0])
        self._sent = self._final = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, request after request."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client is gone: so is the connection
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                path = head.split(" ", 2)[1]
                length = next((int(h[15:]) for h in head.split("\r\n") if h.lower().startswith("content-length:")), 0)
                body = json.loads(await reader.readexactly(length) or b"{}")
                if path == "/generate":
                    await self._generate(body, writer)
                else:
                    _plain(writer, self._facts(path, body))
                await writer.drain()
        writer.close()

    def _facts(self, path: str, body: Json) -> Json:
        if path == "/tokenize":
            return {"tokens": self._tokenizer.encode(body["prompt"], add_special_tokens=False).ids}
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "words", "object": "model", "max_model_len": CONTEXT}]}
        if path == "/counters":
            return {"sent": self._sent, "final": self._final}
        return {"model_path": "words", "weight_version": "v1", "incremental_streaming_output": not self._cumulative}

    async def _generate(self, body: Json, writer: asyncio.StreamWriter) -> None:
        sampling = body["sampling_params"]
        total, interval = int(sampling["max_new_tokens"]), int(sampling.get("stream_interval", 1))
        ends = sorted({1, *range(interval, total, interval), total})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        began, start = asyncio.get_running_loop().time(), 0
        for end in ends:
            wait = began + end * self._pace - asyncio.get_running_loop().time()
            if wait > 0:
                await asyncio.sleep(wait)
            piece = self._piece(body, 0 if self._cumulative else start, end, done=end == total)
            self._sent += len(piece)
            _chunk(writer, piece)
            await writer.drain()
            start = end
        self._final += len(self._piece(body, 0, total, done=True))
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _piece(self, body: Json, start: int, end: int, *, done: bool) -> bytes:
        triples = self._sampled(body, start, end)
        ids = [token for _, token, _ in triples]
        meta = {
            "id": body.get("rid"), "finish_reason": {"type": "length", "length": end} if done else None,
            "prompt_tokens": len(body["input_ids"]), "completion_tokens": end, "cached_tokens": 0,
            "weight_version": "v1", "output_token_logprobs": triples,
        }  # fmt: skip
        return b"data: " + json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode() + b"\n\n"

    def _sampled(self, body: Json, start: int, end: int) -> list[tuple[float, int, None]]:
        """Logprob and id of the tokens from `start` to `end` of a reply."""
        if not self._words:
            return [(-0.6931471824645996, self._word, None)] * (end - start)
        rng = random.Random(body["rid"])
        return [(-rng.random(), rng.choice(self._words), None) for _ in range(end)][start:]


def words(tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Tokens of a byte-level tokenizer that are a space and a short word, and their ids."""
    return sorted((t[1:], i) for t, i in tokenizer.get_vocab().items() if re.fullmatch("\u0120[a-z]{3,9}", t))


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _plain(writer: asyncio.StreamWriter, value: Json) -> None:
    data = json.dumps(value).encode()
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data)


async def main(folder: str, pace: float, *, cumulative: bool, varied: bool) -> None:
    """Serve until killed."""
    engine = Engine(Tokenizer.from_file(f"{folder}/tokenizer.json"), pace, cumulative=cumulative, varied=varied)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, backlog=1024, limit=1 << 26)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="folder with tokenizer.json")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds a token (0)")
    parser.add_argument("--cumulative", action="store_true", help="each piece repeats the whole reply")
    parser.add_argument("--varied", action="store_true", help="say many words")
    given = parser.parse_args()
    asyncio.run(main(given.folder, given.pace, cumulative=given.cumulative, varied=given.varied))
