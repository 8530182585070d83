"""A session written by hand: full prompts and outputs go in, rows of the calls table come out."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from polar_mitm.journal.packing import pack, to_table
from polar_mitm.rows import SCHEMA_VERSION
from polar_toolkit import calls


class Book:
    """Rows of one run. Calls are named by their id; a parent's shared part is found by comparing tokens."""

    def __init__(self, run_id="run", writer="w"):
        self.run_id = run_id
        self.writer = writer
        self.rows = []
        self.tips = {}

    def call(self, name, prompt, output=(), *, parent=None, choice=0, logprob=-0.5, **columns):
        """Record a call; its logprobs are `logprob` for every token unless `logprobs` is given."""
        prompt, output = np.array(prompt, np.int32), np.array(output, np.int32)
        shared = 0
        if parent is not None:
            tip = self.tips[parent if isinstance(parent, tuple) else (parent, 0)]
            both = min(len(tip), len(prompt))
            differs = np.flatnonzero(tip[:both] != prompt[:both])
            shared = int(differs[0]) if len(differs) else both
        self.tips[name, choice] = np.concatenate([prompt, output])
        parent_id, parent_choice = parent if isinstance(parent, tuple) else (parent, None if parent is None else 0)
        row = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "writer": self.writer,
            "sequence": len(self.rows),
            "call_id": name,
            "choice": choice,
            "session_id": "s",
            "kind": "agent",
            "status": "completed",
            "parent_call_id": parent_id,
            "parent_choice": parent_choice,
            "root_reason": "first" if parent is None else None,
            "prompt_len": len(prompt),
            "prompt_shared": shared,
            "prompt_suffix": prompt[shared:],
            "prompt_hash": hashlib.blake2b(prompt.astype("<i4").tobytes(), digest_size=16).digest(),
            "output_ids": output,
            "logprobs": np.full(len(output), logprob, np.float32),
            "versions": [{"start": 0, "end": len(output), "version": "v0"}],
            "temperature": 1.0,
            "trainable": True,
            "client_delivered": True,
        }
        self.rows.append(row | columns)
        return name

    def chain(self, turns, *, context=20, sampled=10):
        """A session of one chain, written in linear time: each turn adds `context` and samples `sampled` tokens."""
        state, length = hashlib.blake2b(digest_size=16), 0
        for turn in range(turns):
            suffix, output = np.full(context, turn, np.int32), np.full(sampled, turn, np.int32)
            state.update(suffix)
            self.call(
                f"c{turn}",
                [],
                output,
                parent_call_id=f"c{turn - 1}" if turn else None,
                parent_choice=0 if turn else None,
                prompt_len=length + context,
                prompt_shared=length,
                prompt_suffix=suffix,
                prompt_hash=state.digest(),
            )
            state.update(output)
            length += context + sampled

    def table(self, order=None):
        """The calls table, its rows in the given order."""
        rows = self.rows if order is None else [self.rows[i] for i in order]
        return to_table(pack(row) for row in rows)

    def calls(self, order=None):
        """The rows as Call values."""
        return calls.from_table(self.table(order))

    def write(self, run: Path, **info):
        """Make a run folder with one sealed file."""
        (run / "calls").mkdir(parents=True)
        run.chmod(0o700)
        sealed = self.table().replace_schema_metadata({"schema_version": str(SCHEMA_VERSION)})
        pq.write_table(sealed, run / "calls" / f"{self.writer}-000001.parquet")
        (run / "run.json").write_text(json.dumps({"run_id": self.run_id, **info}))
        return run


@pytest.fixture
def book():
    """An empty book."""
    return Book()


@pytest.fixture
def new_book():
    """Makes books of several runs."""
    return Book


@pytest.fixture
def engine():
    """A server on loopback that answers each path with what `answers` says, and keeps the bodies it was sent."""
    with Engine(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Engine(ThreadingHTTPServer):
    """`answers` maps a path to a JSON value, or to a function of the request's JSON body."""

    def __init__(self, *args):
        super().__init__(*args)
        self.answers = {}
        self.bodies = []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.answer(body)

    def answer(self, body):
        value = self.server.answers.get(self.path)
        data = json.dumps(value(body) if callable(value) else value).encode()
        self.send_response(404 if value is None else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Tests print nothing."""
