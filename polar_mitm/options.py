"""What a user can set about interception, in one table, and how a run folder and its desk are opened from it.

The same table makes the options of the mitmproxy addon and the flags of `python -m polar_mitm.gateway`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polar_mitm.desk import Desk
from polar_mitm.engine import SGLang
from polar_mitm.errors import PolarError
from polar_mitm.journal import Journal
from polar_mitm.sampling import Sampling
from polar_mitm.tally import Tally
from polar_mitm.tokens import POLICIES, Template, load
from polar_mitm.usage import earlier_usage

_HOST = re.compile(r"[\w-]+(\.[\w-]+)*|\*\.[\w-]+(\.[\w-]+)+")

OPTIONS: tuple[tuple[str, type, Any, str], ...] = (  # Any: a default of the named type
    ("polar_engine", str, "", "URL of the SGLang server that answers every model call, e.g. http://127.0.0.1:30000"),
    ("polar_run", str, "runs/default", "run folder; every call is written here (made with mode 0700)"),
    ("polar_tokenizer", str, "", "tokenizer folder or name; default: the path that the engine reports"),
    (
        "polar_sampling",
        str,
        "{}",
        'how this run samples, as JSON: temperature (1), top_p, top_k, min_p, max_new_tokens, seed; e.g. {"seed": 7}',
    ),
    (
        "polar_history_thinking",
        str,
        "preserve",
        "preserve: reasoning that the harness leaves out of the history stays in the context; template: the model's "
        "chat template decides, and where it writes the history anew a new root begins",
    ),
    (
        "polar_allow_hosts",
        str,
        "",
        "comma-separated hosts that are passed through untouched, *.NAME for all below a name "
        "(example.org,*.github.com); never at an address of this machine or its network",
    ),
    ("polar_wait", float, 600.0, "seconds to wait for an engine that is down, restarting or updating its weights"),
    (
        "polar_memory",
        int,
        512,
        "megabytes for finished calls that may be continued or asked for again; what does not fit is read from the run "
        "folder when it is needed",
    ),
)


@dataclass(frozen=True, slots=True)
class Options:
    """The values of `OPTIONS`."""

    polar_engine: str
    polar_run: str
    polar_tokenizer: str
    polar_sampling: str
    polar_history_thinking: str
    polar_allow_hosts: str
    polar_wait: float
    polar_memory: int

    @property
    def run(self) -> Path:
        """The run folder."""
        return Path(self.polar_run).expanduser()

    @property
    def allowed(self) -> tuple[str, ...]:
        """Hosts that are passed through, in lower case."""
        return tuple(h.strip().lower() for h in self.polar_allow_hosts.split(",") if h.strip())

    def check(self) -> None:
        """Raises ValueError with one sentence for a value that cannot work."""
        if not self.polar_engine.startswith(("http://", "https://")):
            raise ValueError(
                f"polar_engine is {self.polar_engine!r}: give the URL of the SGLang server (http://host:port)"
            )
        if not self.polar_wait >= 0:  # also what is not a number
            raise ValueError(f"polar_wait is {self.polar_wait!r}: give a number of seconds, 0 or more")
        if self.polar_memory < 1:
            raise ValueError(f"polar_memory is {self.polar_memory!r}: give a number of megabytes, 1 or more")
        for host in self.allowed:
            if not _HOST.fullmatch(host):
                raise ValueError(f"polar_allow_hosts names {host!r}: give host names, or *.NAME.TLD for all below one")
        if self.polar_history_thinking not in POLICIES:
            raise ValueError(
                f"polar_history_thinking is {self.polar_history_thinking!r}: give one of {', '.join(POLICIES)}"
            )
        Sampling.parse(self.polar_sampling)


@dataclass(slots=True)
class Run:
    """A run that is open for calls."""

    desk: Desk
    journal: Journal
    engine: SGLang
    tally: Tally

    async def close(self) -> None:
        """Record what is in flight, seal the journal, close the connections."""
        await self.desk.close()
        await self.journal.close()
        await self.engine.close()


async def open_run(options: Options, *, keeps_rows: bool = False) -> Run:
    """Open the run folder, the tokenizer and the engine. `keeps_rows`: the tally keeps the last rows, to be shown.

    Raises ValueError for a bad option, TokenizerMismatch when the engine is up and its tokenizer is another, and
    EngineUnavailable when the engine is down and would be needed to find the tokenizer.
    """
    options.check()
    engine = SGLang(options.polar_engine)
    try:
        folder = options.polar_tokenizer or (await engine.describe()).model
        template = await asyncio.to_thread(load, folder, options.polar_history_thinking)
        run, sampling = options.run, Sampling.parse(options.polar_sampling)
        run.mkdir(parents=True, exist_ok=True, mode=0o700)
        run.chmod(0o700)
        run_id = _write_run(options, folder, sampling, template)
        journal = await asyncio.to_thread(Journal.open, run)
        earlier = await asyncio.to_thread(earlier_usage, run)
    except (PolarError, OSError, ValueError):
        await engine.close()
        raise
    tally = Tally(journal, keeps_rows=keeps_rows)
    desk = Desk(
        run, run_id, engine=engine, template=template, journal=tally, sampling=sampling, wait=options.polar_wait,
        memory=options.polar_memory << 20, earlier=earlier,
    )  # fmt: skip
    return Run(desk, journal, engine, tally)


def _write_run(options: Options, tokenizer: str, sampling: Sampling, template: Template) -> str:
    """Write run.json; a folder that is used again keeps its run id."""
    path = options.run / "run.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    run_id = str(known.get("run_id") or f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(3)}")
    described = {
        "schema_version": 1,
        "run_id": run_id,
        "engine": options.polar_engine,
        "tokenizer": str(Path(tokenizer).resolve()) if Path(tokenizer).exists() else tokenizer,
        "tokenizer_fingerprint": template.fingerprint,
        "family": template.family if template.bridges else "none",
        "history_thinking": options.polar_history_thinking,
        "sampling": asdict(sampling),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_json(path, described)
    return run_id


def write_json(path: Path, value: dict[str, Any]) -> None:  # Any: JSON
    """Replace a small JSON file of the run folder in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    temporary.replace(path)
