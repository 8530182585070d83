"""Which method, host and path get which treatment: the one table, from which docs/protocols.md is made.

Invariant: the first route that fits decides, and every request fits one, because the last refuses. Hosts matter only
where two providers use one path: a protocol is answered on whatever host and base path it is spoken. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlencode

from polar_mitm.wire import DIALECTS, Dialect


class Treatment(StrEnum):
    """What becomes of a request; the values read as the documentation of the route."""

    GENERATE = "answered by the engine and recorded"
    COUNT = "tokens counted exactly; nothing is sampled or recorded"
    MODELS = "the engine's model, as the provider's list"
    MODEL = "the engine's model, under the name that was asked for"
    STORED = "the run's own record of that answer"
    WEBSOCKET = "426, so that the client posts instead"
    REFUSE = "404 at once, in the provider's own shape"


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table."""

    methods: str
    """The HTTP methods, by blanks; `*` for any."""
    path: str
    """`*` stands for anything, `{name}` for a segment that joins the fields of the request."""
    treatment: Treatment
    dialect: str = ""
    """Name of the protocol; "" for whichever the host or the headers speak."""
    hosts: tuple[str, ...] = ()
    """The hosts, or their parents, that it is for; empty for all."""
    header: str = ""
    """A request header that must be there."""
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Any: JSON
    """What joins the fields of the request besides the path's own."""
    query: tuple[str, ...] = ()
    """Query parameters that join them too."""
    why: str = ""
    """For the documentation, where it is not plain."""

    def fits(self, method: str, host: str, path: str, headers: Mapping[str, str]) -> re.Match[str] | None:
        """The match of the path, when everything else fits too."""
        if self.methods != "*" and method not in self.methods.split():
            return None
        if self.hosts and not _below(host, self.hosts):
            return None
        return _pattern(self.path).fullmatch(path) if not self.header or self.header in headers else None


@dataclass(frozen=True, slots=True)
class Match:
    """The treatment of one request."""

    treatment: Treatment
    dialect: Dialect
    """Also of a refusal: its error is the provider's own."""
    fields: Mapping[str, Any]  # Any: JSON
    """What the path and the query say; they join the fields of the body."""


_GOOGLE = ("googleapis.com",)
_ANTHROPIC = ("api.anthropic.com",)

ROUTES: tuple[Route, ...] = (
    Route(
        "GET", "*/models", Treatment.REFUSE, hosts=("chatgpt.com",),
        why="Codex 0.171.0 has a list of its own there, and uses what it knows of its models without it",
    ),
    Route("GET", "*", Treatment.WEBSOCKET, header="sec-websocket-key", why="Codex 0.171.0 asks for one first"),
    Route(
        "POST", "*/openai/deployments/{model}/chat/completions", Treatment.GENERATE, "openai_chat",
        why="Azure names the model in the path",
    ),
    Route("POST", "*/chat/completions", Treatment.GENERATE, "openai_chat"),
    Route("POST", "*/responses", Treatment.GENERATE, "openai_responses"),
    Route(
        "POST", "*/responses/compact", Treatment.GENERATE, "openai_responses", fields={"compacts": True},
        why="the answer is one compaction item",
    ),
    Route("POST", "*/responses/input_tokens", Treatment.COUNT, "openai_responses"),
    Route("GET DELETE", "*/responses/{answer}", Treatment.STORED, "openai_responses"),
    Route("POST", "*/v1/messages", Treatment.GENERATE, "anthropic"),
    Route("POST", "*/v1/messages/count_tokens", Treatment.COUNT, "anthropic"),
    Route(
        "POST", "*/{model}:rawPredict", Treatment.GENERATE, "anthropic", fields={"stream": False},
        why="Messages as Vertex AI carries them",
    ),
    Route(
        "POST", "*/{model}:streamRawPredict", Treatment.GENERATE, "anthropic", fields={"stream": True},
        why="the same, streamed",
    ),
    Route("POST", "*/{model}:generateContent", Treatment.GENERATE, "gemini", fields={"stream": False}),
    Route(
        "POST", "*/{model}:streamGenerateContent", Treatment.GENERATE, "gemini", fields={"stream": True},
        query=("alt",),
    ),
    Route("POST", "*/{model}:countTokens", Treatment.COUNT, "gemini"),
    Route("GET", "*/models", Treatment.MODELS, "gemini", hosts=_GOOGLE),
    Route("GET", "*/models/{model}", Treatment.MODEL, "gemini", hosts=_GOOGLE),
    Route("GET", "*/v1beta/models", Treatment.MODELS, "gemini"),
    Route("GET", "*/v1beta/models/{model}", Treatment.MODEL, "gemini"),
    Route("GET", "*/models", Treatment.MODELS, "anthropic", hosts=_ANTHROPIC),
    Route("GET", "*/models/{model}", Treatment.MODEL, "anthropic", hosts=_ANTHROPIC),
    Route("GET", "*/models", Treatment.MODELS, "anthropic", header="anthropic-version"),
    Route("GET", "*/models/{model}", Treatment.MODEL, "anthropic", header="anthropic-version"),
    Route("GET", "*/models", Treatment.MODELS, "openai_chat"),
    Route("GET", "*/models/{model}", Treatment.MODEL, "openai_chat"),
    Route(
        "*", "*", Treatment.REFUSE,
        why="telemetry, settings, updates: no harness needs them, and each waits longer for any other answer",
    ),
)  # fmt: skip


def find(method: str, host: str, path: str, query: str, headers: Mapping[str, str]) -> Match:
    """The treatment of a request; `host` without port, `path` without query, header names in lower case."""
    host, path = host.lower(), path.rstrip("/") or "/"
    for route in ROUTES:
        found = route.fits(method, host, path, headers)
        if found is not None:
            asked = {name: values[-1] for name, values in parse_qs(query).items() if name in route.query}
            fields = {**asked, **found.groupdict(), **route.fields}
            return Match(route.treatment, _SPEAKERS[route.dialect or _spoken(host, headers)], fields)
    raise AssertionError("the last route fits everything")


def kept_query(query: str) -> str:
    """The part of a query string that some route reads; the rest may hold keys and is dropped."""
    read = {name for route in ROUTES for name in route.query}
    return urlencode([(name, values[-1]) for name, values in parse_qs(query).items() if name in read])


def _spoken(host: str, headers: Mapping[str, str]) -> str:
    """The protocol in which an error will be understood."""
    if _below(host, _GOOGLE) or "x-goog-api-key" in headers or "x-goog-api-client" in headers:
        return "gemini"
    return "anthropic" if host in _ANTHROPIC or "anthropic-version" in headers else "openai_chat"


def _below(host: str, names: tuple[str, ...]) -> bool:
    return any(host == name or host.endswith(f".{name}") for name in names)


@cache
def _pattern(path: str) -> re.Pattern[str]:
    anything = re.escape(path).replace(r"\*", ".*")
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", anything), re.DOTALL)


_SPEAKERS: dict[str, Dialect] = {dialect.name: dialect for dialect in DIALECTS}
