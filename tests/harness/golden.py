"""Writes tests/mitm/wire/golden: requests of the pinned harnesses, as this bench's interceptor receives them.

    python -m tests.harness.golden [CELL ...]      # all cells, or those named as in the matrix

Invariant: what is written is the request's own shape. Three things are changed, by rule: strings longer than CUT
characters are cut to their beginning and a note of their length, unless they are JSON or opaque values that a harness
must return; ids (the harness's and the minted ones), times and folders of the machine are replaced by constants; only
headers that say who the client is or which thread it is in are kept. Beside each request stands what its decoding has
to say (expected/), written by the decoder itself: read the difference before it is committed.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar_mitm.errors import BadRequest
from polar_mitm.routes import Treatment
from tests.bench.interception import interception
from tests.bench.provisions import ROOT
from tests.harness.cells import Cell, cells
from tests.mitm.wire.summary import decoded, route, summary

FOLDER = ROOT / "tests" / "mitm" / "wire"
CUT = 160
Json = dict[str, Any]  # Any: requests
_HEADERS = re.compile(
    r"user-agent|originator|anthropic-(beta|version)|session-id|thread-id|x-session-.*|x-goog-api-client|"
    r"x-claude-code-(session-id|request-class|agent-id|agent-type)|x-codex-(window-id|beta-features)|"
    r"x-openai-internal-codex-responses-lite|x-stainless-retry-count"
)
_OPAQUE = {"encrypted_content", "signature", "thoughtSignature", "data", "id", "call_id", "tool_call_id"}
_CLOCKS = {"create_time": 0.0}
_MACHINE = (
    (re.compile(r"(?<=<current_date>)[^<]*"), "2026-01-01"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "0" * 64),  # Claude Code's device
    (re.compile(r"\b1[78]\d{11}\b"), "0"),  # milliseconds
)
_CORE = re.compile(r"([a-z2-7]{20})[0-9a-f]{2}[a-z2-7]{8}")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Golden:
    """One request that is kept."""

    cell: str
    case: str
    chosen: Callable[[Json, str], bool]
    """Given the request and the text of its body; the last one that fits is taken."""


def _results(_: Json, text: str) -> bool:
    return "wrote 0: " in text and "tool" in text


GOLDENS = [
    Golden("codex-openai", "tool-turn", _results),
    Golden("codex-default-model", "custom-tool-turn", _results),
    Golden("codex-compacting", "compaction-trigger", lambda _, text: '"compaction_trigger"' in text),
    Golden("codex-compacting", "compacted", lambda _, text: '"type":"compaction"' in text),
    Golden("claude-code-anthropic", "tool-turn", _results),
    Golden("claude-code-sub-agents", "subagent", lambda r, text: "x-claude-code-agent-id" in r["headers"]),
    Golden("claude-code-resumed", "resume", lambda _, text: "Is it there?" in text),
    Golden("pi-openai", "responses-tool-turn", _results),
    Golden("pi-anthropic", "anthropic-thread", lambda _, text: '"thread":' in text),
    Golden("pi-anthropic", "anthropic-tool-turn", _results),
    Golden("pi-google", "gemini-tool-turn", _results),
    Golden("pi-openrouter", "chat-tool-turn", _results),
    Golden("qwen-code-openai", "tool-turn", _results),
    Golden("gemini-cli-google", "router", lambda r, _: r["path"].endswith(":generateContent")),
    Golden("gemini-cli-google", "tool-turn", _results),
    Golden("opencode-openai", "title", lambda _, text: '"tools"' not in text),
    Golden("opencode-openai", "tool-turn", _results),
    Golden("mini-swe-agent-openai", "tool-turn", _results),
    Golden("mini-swe-agent-anthropic", "anthropic-tool-turn", _results),
]


def main(names: list[str]) -> None:
    """Play the cells and write what their harnesses sent."""
    for cell in cells():
        kept = [golden for golden in GOLDENS if golden.cell == cell.name]
        if kept and (not names or cell.name in names):
            with tempfile.TemporaryDirectory() as folder:
                requests = _recorded(Path(folder), cell)
                for golden in kept:
                    _write(f"{_harness(cell)}-{cell.version}.{golden.case}", golden, requests)


def _recorded(folder: Path, cell: Cell) -> list[Json]:
    """Every model call that the cell's harness made, scrubbed."""
    tap = folder / "requests.jsonl"
    with interception(folder, cell.act) as bench, bench.proxy(tap=str(tap)):
        cell.run(bench)
    lines = [json.loads(line) for line in tap.read_text().splitlines()]
    return [_scrubbed(line, folder) for line in lines if route(line).treatment is Treatment.GENERATE]


def _scrubbed(request: Json, folder: Path) -> Json:
    text = json.dumps(request | {"body": json.loads(request["body"])}, ensure_ascii=False)
    for found, shown in ((str(folder), "/bench"), (str(ROOT), "/project"), (folder.name, "bench")):
        text = text.replace(found, shown)
    for pattern, constant in _MACHINE:
        text = pattern.sub(constant, text)
    for number, uuid in enumerate(dict.fromkeys(_UUID.findall(text))):
        text = text.replace(uuid, f"00000000-0000-4000-8000-{number:012d}")
    for number, call_id in enumerate(dict.fromkeys(_CORE.findall(text))):
        text = re.sub(
            call_id + "([0-9a-f]{2})[a-z2-7]{8}",
            rf"{'call':a<19}{'abcdefghijklmnopqrstuvwxyz'[number]}\1aaaaaaaa",
            text,
        )
    scrubbed: Json = json.loads(text)
    headers = {name: value for name, value in sorted(scrubbed["headers"].items()) if _HEADERS.fullmatch(name)}
    return scrubbed | {"headers": headers, "body": _shortened(scrubbed["body"])}


def _shortened(value: Any, name: str = "") -> Any:  # Any: JSON
    if isinstance(value, dict):
        return {key: _CLOCKS.get(key, _shortened(inner, key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_shortened(inner, name) for inner in value]
    if isinstance(value, str) and len(value) > CUT and name not in _OPAQUE and not value.startswith(("{", "[")):
        return f"{value[: CUT - 40]} <cut: {len(value)} characters>"
    return value


def _write(name: str, golden: Golden, requests: list[Json]) -> None:
    chosen = [r for r in requests if golden.chosen(r, json.dumps(r["body"], ensure_ascii=False, separators=(",", ":")))]
    if not chosen:
        raise SystemExit(f"{golden.cell} made no request for {name!r}; it made {[r['path'] for r in requests]}")
    request = chosen[-1]
    _dump(FOLDER / "golden" / f"{name}.json", request)
    try:
        _dump(FOLDER / "expected" / f"{name}.json", summary(decoded(request)))
    except BadRequest as error:
        _dump(FOLDER / "expected" / f"{name}.json", {"refused": str(error)})
    print(name)


def _dump(path: Path, value: Json) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _harness(cell: Cell) -> str:
    return next(path.parent.name for path in (ROOT / "harness_images").glob("*/harness.toml")
                if cell.name.startswith(path.parent.name))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
