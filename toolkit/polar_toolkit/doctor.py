"""Checks of a run and its surroundings, one line each: what works, what looks wrong, what to do.

Invariant: a check never raises and never changes anything; what fails is a line that names the remedy.
"""

from __future__ import annotations

import fcntl
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import httpx
from packaging.version import Version

from polar_toolkit import calls, environment, inspection
from polar_toolkit.errors import Refusal

_LIBRARIES = ("renderers", "transformers", "pyarrow", "numpy", "polars")
_MITMPROXY = (Version("12.2.3"), Version("12.3"))
_LOW_DISK = 2 << 30
"""Free bytes below which a long run is at risk."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    verdict: Literal["ok", "warn", "fail"]
    name: str
    text: str


def examine(run: Path) -> Iterator[Check]:
    """All checks, in order."""
    checks: tuple[Callable[[Path], Iterator[Check]], ...] = (
        _versions, _folder, _proxy, _engine, _tokenizer, _disk, _journals,
    )  # fmt: skip
    for check in checks:
        try:
            yield from check(run)
        except Refusal as refusal:  # a broken file of the run: the finding itself
            yield Check("fail", check.__name__.strip("_"), str(refusal))


def _versions(run: Path) -> Iterator[Check]:
    fine = sys.version_info >= (3, 12)
    yield Check("ok" if fine else "fail", "python", platform.python_version() + ("" if fine else "; needs 3.12"))
    found = Version(metadata.version("mitmproxy"))
    fine = _MITMPROXY[0] <= found < _MITMPROXY[1]
    remedy = "" if fine else f"; install mitmproxy>={_MITMPROXY[0]},<{_MITMPROXY[1]}"
    yield Check("ok" if fine else "fail", "mitmproxy", f"{found}{remedy}")
    yield Check("ok", "libraries", ", ".join(f"{name} {metadata.version(name)}" for name in _LIBRARIES))


def _folder(run: Path) -> Iterator[Check]:
    if not run.is_dir():
        yield Check("fail", "run folder", f"{run} does not exist; the interceptor makes it at its first start")
        return
    for path, wanted in ((run, 0o700), (run / "key", 0o600), (run / "sessions.jsonl", 0o600)):
        if path.exists():
            mode = path.stat().st_mode & 0o777
            open_to_others = bool(mode & 0o077)
            remedy = f"; others can read it: chmod {wanted:o} {path}" if open_to_others else ""
            yield Check("warn" if open_to_others else "ok", path.name, f"mode {mode:o}{remedy}")


def _proxy(run: Path) -> Iterator[Check]:
    if not (run / "proxy.json").is_file():
        yield Check("warn", "interceptor", f"has not run; start mitmdump -s addons/polar.py --set polar_run={run}")
        return
    proxy = environment.read_proxy(run)
    up = proxy.reachable()
    text = f"{proxy.host}:{proxy.port}" + ("" if up else " does not answer; start it again to go on with the run")
    yield Check("ok" if up else "warn", "interceptor", text)
    there = proxy.ca.is_file()
    yield Check("ok" if there else "fail", "certificate", f"{proxy.ca}" + ("" if there else " is missing; restart"))


def _engine(run: Path) -> Iterator[Check]:
    engine = calls.run_info(run).get("engine")
    if not engine:
        yield Check("warn", "engine", "run.json names none; it is written when the interceptor starts")
        return
    try:
        answer = httpx.get(f"{str(engine).rstrip('/')}/model_info", timeout=5.0, trust_env=False)
        info = answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:  # unreachable, or not JSON: the finding
        yield Check("fail", "engine", f"{engine} does not answer /model_info ({error}); start it")
        return
    yield Check("ok", "engine", f"{engine}: {info.get('model_path')}, weights {info.get('weight_version')!r}")


def _tokenizer(run: Path) -> Iterator[Check]:
    name = calls.run_info(run).get("tokenizer")
    if name:
        loads = inspection.load_decoder(run) is not None
        remedy = "" if loads else " does not load here; calls are shown as ids"
        yield Check("ok" if loads else "warn", "tokenizer", f"{name}{remedy}")


def _disk(run: Path) -> Iterator[Check]:
    if run.is_dir():
        free = shutil.disk_usage(run).free
        low = free < _LOW_DISK
        text = f"{free / (1 << 30):.1f} GiB free" + ("; a call that cannot be written fails" if low else "")
        yield Check("warn" if low else "ok", "disk", text)


def _journals(run: Path) -> Iterator[Check]:
    if not (run / "journal").is_dir() and not (run / "calls").is_dir():
        return
    live = sorted((run / "journal").glob("*.journal"))
    locked = sum(_locked(path) for path in live)
    dead = len(live) - locked
    note = "; the next start of the interceptor seals the dead ones" if dead else ""
    yield Check("ok", "journals", f"{locked} live, {dead} of dead writers{note}")
    rows = calls.read(run)
    lost = sum(call.status == "lost" for call in rows)
    yield Check("warn" if lost else "ok", "calls", f"{len(rows)} readable, {lost} lost")


def _locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # its writer holds it: live
            return True
    return False
