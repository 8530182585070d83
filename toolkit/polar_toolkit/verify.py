"""What a model's chat template does to a conversation: where it only appends, and what the bridge makes of it.

Invariant: the bridge is judged by the template's own text, step by step over the scripted conversations of
`polar_mitm.tokens.script`; no engine and no model is asked. A bridged prompt that is not faithful fails the check; a
faithful one that differs from the canonical render is drift, told with its class and never a failure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table
from rich.text import Text

from polar_mitm import divergence
from polar_mitm.tokens import Template, family, load, probe, script
from polar_mitm.tokens.chat_template import common
from polar_toolkit.errors import Refusal

Outcome = Literal["equal", "drift", "no bridge", "unfaithful", "not taken"]
_BEFORE, _AFTER = 12, 24
"""Characters of a window that are shown around the place of a difference."""
_MEANING = {
    "typed": "a typed renderer of this family extends what was sampled",
    "difference": "what the template itself writes after a reply extends what was sampled",
    "difference, texts only": "only replies of text are extended; after a tool call every prompt is a full render",
    "none": "nothing is extended: every prompt is a full render, and what was sampled is trained in pieces",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """One step of a scripted conversation."""

    step: str
    outcome: Outcome
    append_only: bool | None = None
    """Whether the template leaves prompt and reply as they were sampled; None when the step could not be taken."""
    drift: str | None = None
    """The class of the first difference between the bridged and the canonical prompt."""
    sampled: str = ""
    rendered: str = ""
    """Both prompts around that difference, decoded."""
    reason: str = ""
    """Why the step was not taken."""


@dataclass(frozen=True, slots=True)
class Report:
    """A model's template, verified."""

    family: str
    bridge: str
    meaning: str
    reads_calls: bool
    """Whether sampled tool calls are read; False: a call reaches the harness as text."""
    stops: dict[int, str]
    """The ids at which a reply ends, decoded."""
    against: str
    """What spoke against this family, or against a typed one."""
    steps: tuple[Seen, ...]

    @property
    def faithful(self) -> bool:
        """Whether every bridged prompt says what the request says."""
        return all(seen.outcome != "unfaithful" for seen in self.steps)

    @property
    def append_only(self) -> tuple[int, int]:
        """On how many steps the template only appends, of how many that it can say."""
        told = [seen.append_only for seen in self.steps if seen.append_only is not None]
        return sum(told), len(told)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""  # Any: JSON
        return asdict(self) | {"faithful": self.faithful, "append_only": list(self.append_only)}


def verify(folder: Path, family_name: str | None = None) -> Report:
    """The report of a model or tokenizer folder; see `examine`. Raises Refusal when it holds no tokenizer."""
    if family_name is not None and family_name not in family.names():
        raise Refusal(f"--family {family_name!r} is none of {', '.join(family.names())}")
    try:
        template = load(folder)
    except (OSError, ValueError) as error:  # transformers' own: told in one sentence
        raise Refusal(f"{folder} holds no tokenizer that can be read: {str(error).splitlines()[0]}") from error
    report = examine(template)
    if family_name not in (None, report.family):
        raise Refusal(f"{folder} is not spoken by {family_name!r} but by {report.family!r}: {report.against}")
    return report


def examine(template: Template) -> Report:
    """Take a template through every scripted step."""
    return Report(
        template.family if template.bridges or template.found.renderer else "none",
        template.bridge_kind,
        _MEANING[template.bridge_kind],
        template.found.renderer is not None,
        {stop: template.decode([stop]) for stop in template.stop_ids},
        template.found.reason,
        tuple(_seen(template, step) for step in script.ALL),
    )


def table(report: Report) -> Table:
    """The steps, for people."""
    shown = Table("step", "appends", "bridge", "drift", "sampled -> rendered")
    for seen in report.steps:
        appends = "" if seen.append_only is None else "yes" if seen.append_only else "no"
        shown.add_row(seen.step, appends, seen.outcome, seen.drift or "", Text(seen.reason or _difference(seen)))
    return shown


def _difference(seen: Seen) -> str:
    """Both windows from shortly before the place where they part."""
    if seen.drift is None:
        return ""
    start = max(0, common(seen.sampled, seen.rendered) - _BEFORE)
    sampled, rendered = (window[start : start + _BEFORE + _AFTER] for window in (seen.sampled, seen.rendered))
    return f"{sampled!r}\n{rendered!r}"


def summary(report: Report) -> str:
    """The whole in two lines."""
    appends, told = report.append_only
    calls = "calls are read" if report.reads_calls else "calls reach the harness as text"
    stops = ", ".join(f"{text!r} ({stop})" for stop, text in report.stops.items())
    verdict = "every bridged prompt is faithful" if report.faithful else "NOT FAITHFUL: see the steps above"
    return (
        f"family {report.family}, bridge {report.bridge}: {report.meaning}; {calls}\n"
        f"stops at {stops}; append-only on {appends} of {told} steps; {verdict}"
    )


def _seen(template: Template, step: script.Step) -> Seen:
    rendered = probe.render(template.chat, step)
    if isinstance(rendered, str):
        return Seen(step.name, "not taken", reason=rendered)
    stops = frozenset(template.stop_ids)
    taken = rendered.ended(stops)
    prompt, output = np.asarray(taken.prompt, np.int32), np.asarray(taken.output, np.int32)
    bridged = template.bridge(prompt, output, step.request, len(step.history) + 1, step.tools)
    if bridged is None:
        return Seen(step.name, "no bridge", taken.append_only)
    told = _drift(template, bridged.tolist(), taken.canonical)
    if not probe.is_faithful(template.chat, taken, bridged.tolist(), stops):
        return Seen(step.name, "unfaithful", taken.append_only, *told)
    return Seen(step.name, "drift" if told else "equal", taken.append_only, *told)


def _drift(template: Template, bridged: list[int], canonical: list[int]) -> tuple[str, str, str] | tuple[()]:
    found = divergence.drift(template, np.asarray(bridged, np.int32), np.asarray(canonical, np.int32))
    return () if found is None else (found.kind, found.sampled, found.rendered)
