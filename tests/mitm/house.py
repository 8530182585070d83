"""A gateway that serves on loopback, with a real journal behind it, and a client that can leave or look at every byte.

Invariant: leaving `open_house` closes the desk and the journal in the order of the real program, so that afterwards
the rows of the run are complete.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from polar_mitm.desk import Desk
from polar_mitm.engine import SGLang
from polar_mitm.gateway import Gateway, listen, server
from polar_mitm.journal import FileSink, Journal, Sink, read_calls
from polar_mitm.sampling import Sampling
from polar_mitm.tokens import Template

Json = dict[str, Any]
PATIENCE = 10.0
"""Seconds after which a test gives up waiting for what must happen."""


class House:
    """What the tests see of it."""

    def __init__(self, run: Path, desk: Desk, loop: asyncio.AbstractEventLoop, port: int) -> None:
        self.run, self.desk, self.port = run, desk, port
        self.hidden: set[str] = set()
        """Ids of the calls that `calls` leaves out: those of other tests in the same house."""
        self._loop = loop
        url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=url, trust_env=False, verify=False, timeout=PATIENCE)  # no TLS to verify

    def post(self, path: str, body: Json, **headers: str) -> httpx.Response:
        """A whole answer."""
        return self.client.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def calls(self) -> list[Json]:
        """The finished rows so far."""
        return [row for row in read_calls(self.run).to_pylist() if row["call_id"] not in self.hidden]

    def inside(self, work: Any) -> Any:
        """Run a coroutine in the house's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def settle(self) -> None:
        """Return when what the loop knows already has been acted on."""

        async def turns() -> None:
            for _ in range(50):
                await asyncio.sleep(0)

        self.inside(turns())


@contextmanager
def open_house(
    run: Path, engine: str, template: Template, *, sink: Callable[[Path], Sink] = FileSink, wait: float = 5.0,
    sampling: str = "{}", secret: str = "", described: bool = False,
) -> Generator[House]:  # fmt: skip
    """Serve from a thread while inside the block. `described`: meet the engine first, as serve() does."""
    journal = Journal.open(run, sink=sink)
    listener = listen("127.0.0.1", 0)
    opened: list[House] = []
    started, stop = threading.Event(), threading.Event()

    async def live() -> None:
        client = SGLang(engine)
        desk = Desk(
            run,
            "run-1",
            engine=client,
            template=template,
            journal=journal,
            sampling=Sampling.parse(sampling),
            wait=wait,
        )
        if described:
            await desk.ready()
        served = server(Gateway(desk, secret))
        serving = asyncio.create_task(served.serve(sockets=[listener]))
        opened.append(House(run, desk, asyncio.get_running_loop(), listener.getsockname()[1]))
        started.set()
        await asyncio.to_thread(stop.wait)
        await desk.close()
        served.stop()
        await serving
        await client.close()

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    try:
        assert started.wait(PATIENCE)
        yield opened[0]
    finally:
        for house in opened:
            house.client.close()
        stop.set()
        thread.join()
        listener.close()
        if not journal._broken:  # pyright: ignore[reportPrivateUsage] - a broken journal cannot be sealed
            journal.close_sync()


class Caller:
    """A client over a bare socket: it sees every byte when it comes, and can leave at any moment."""

    def __init__(self, house: House, path: str, body: Json, headers: Mapping[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        given = {"host": "api.example.org", "user-agent": "pi/1", "content-type": "application/json"} | (headers or {})
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self._socket = socket.create_connection(("127.0.0.1", house.port))
        self._socket.sendall(f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
        self._changed = threading.Condition()
        self.received = b""
        self._ended = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def got(self, marker: bytes, seconds: float = PATIENCE) -> bool:
        """Whether these bytes come within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: marker in self.received, seconds)

    def rest(self) -> bytes:
        """Everything that was received, once the server has closed."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended, PATIENCE)
        self._socket.close()
        return self.received

    def leave(self) -> None:
        """Hang up."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _read(self) -> None:
        while piece := self._piece():
            with self._changed:
                self.received += piece
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _piece(self) -> bytes:
        try:
            return self._socket.recv(65536)
        except OSError:  # hung up
            return b""


class Gate:
    """A disk whose fsync can be held, or made to fail."""

    def __init__(self) -> None:
        self.shut = False
        """Whether the next fsync waits."""
        self.reached = threading.Event()
        """Set when one does."""
        self._opened = threading.Event()
        self._error: OSError | None = None
        self.passed_at = 0.0
        """Monotonic time at which it returned."""

    def open(self, error: OSError | None = None) -> None:
        """Let it return, or raise."""
        self._error = error
        self.passed_at = time.monotonic()
        self._opened.set()

    def sink(self, path: Path) -> Sink:
        """For `Journal.open`."""
        return _GatedSink(FileSink(path), self)

    def pass_through(self) -> None:
        """Called by the sink before it syncs."""
        if self.shut:
            self.reached.set()
            if not self._opened.wait(PATIENCE):
                raise OSError("the test did not open the gate")
            if self._error:
                raise self._error


class _GatedSink:
    def __init__(self, file: FileSink, gate: Gate) -> None:
        self._file, self._gate = file, gate
        self.write, self.close = file.write, file.close

    def fsync(self) -> None:
        self._gate.pass_through()
        self._file.fsync()


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for what another thread or process is about to do."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        threading.Event().wait(0.005)
