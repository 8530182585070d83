"""Server-sent events: the framing of streamed answers, and JSON as bytes.

Invariant: one event is one `data:` line of valid UTF-8 and ends with a blank line. This module knows no protocol.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"
"""How OpenAI Chat Completions ends a stream."""


_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""Characters that some clients (httpx's `iter_lines`) take for the end of a line, as JSON escapes."""


def data(value: Mapping[str, Any]) -> bytes:  # Any: JSON
    """One event without a name."""
    return b"data: " + json_bytes(value) + b"\n\n"


def event(value: Mapping[str, Any]) -> bytes:  # Any: JSON
    """One event named by its own `type`. Claude Code and Pi need the `event:` line; Codex does without."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)


def json_bytes(value: Mapping[str, Any]) -> bytes:  # Any: JSON
    """A JSON object as compact UTF-8.

    A lone surrogate, which UTF-8 cannot hold but JSON text can, becomes its JSON escape; so do Unicode's line breaks.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_LINE_BREAKS)
    return text.encode("utf-8", "backslashreplace")
