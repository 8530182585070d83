"""Which typed renderer of the `renderers` library speaks a model's chat template: found by probing, not by name.

Invariant: a renderer is chosen only when it reads back the replies that the template writes, and it renders and bridges
only where it was seen to do so as the template does; `template` does the rest. Local folders and fine-tunes carry no
telling name, and a wrong family would be silent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Protocol

import renderers
from renderers import configs

from polar_mitm.conversation import Part, ToolCall
from polar_mitm.tokens import harmony, plain, probe, script
from polar_mitm.tokens.chat_template import ChatTemplate
from polar_mitm.tokens.parsed import from_renderer

_SHORT = 64
"""Characters of a text that is worth remembering: headers and separators of a family, not messages."""
_NOT_THIS_FAMILY = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError
)  # fmt: skip
"""What the library raises over a vocabulary or a history that is not the family's."""


class Speaker(Protocol):
    """What is used of a typed renderer."""  # Any: JSON as the library types it

    def get_stop_token_ids(self) -> list[int]:
        """Ids at which the model stops."""
        ...

    def render_ids(self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        """A whole conversation."""
        ...

    def bridge_to_next_turn(
        self, prompt: list[int], output: list[int], new_messages: list[Any], /, *, tools: Any = None
    ) -> renderers.RenderedTokens | None:
        """A sampled context, extended."""
        ...

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> renderers.ParsedResponse:
        """A sample, read."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """The typed renderer of a chat template, or the reason why there is none."""

    renderer: Speaker | None
    name: str
    """The family; "template" when no typed renderer speaks it."""
    renders: bool = False
    """Whether its full renderings are the template's own, wherever the template says all of a history."""
    bridges: bool = False
    """Whether its bridge adds what the template says, on every scripted step that decides."""
    extends: bool = False
    """Whether it does so where it bridges at all, after texts and after calls; elsewhere it declines."""
    reason: str = ""
    """What spoke against it, or against the family that came nearest."""


class _Remembering:
    """A tokenizer that encodes the short texts which a family's parser asks for again at every read only once."""

    def __init__(self, tokenizer: Any) -> None:  # Any: a transformers tokenizer, untyped
        self._tokenizer = tokenizer
        self._encoded = lru_cache(maxsize=256)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))

    def encode(self, text: str, **options: Any) -> list[int]:  # Any: transformers' options
        """As the tokenizer does."""
        if len(text) > _SHORT or options != {"add_special_tokens": False}:
            return list(self._tokenizer.encode(text, **options))
        return list(self._encoded(text))

    def __call__(self, *texts: Any, **options: Any) -> Any:  # Any: transformers' own
        return self._tokenizer(*texts, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:  # Any: whatever the tokenizer has
        return getattr(self._tokenizer, name)


def find(tokenizer: Any, chat: ChatTemplate) -> Found:  # Any: a transformers tokenizer, untyped
    """The typed renderer that speaks the chat template, or the reason why none does.

    Reasoning of earlier turns is kept (`thinking_retention="all"`) where the family offers the choice, so that a new
    user message extends the sampled context instead of re-writing it.
    """
    if not chat.says_calls:
        return Found(None, "template", reason="the template says no tool calls, by which families are told apart")
    steps = [step for s in script.SAID if isinstance(step := probe.render(chat, s), probe.Rendered)]
    if not set(_READ) <= {s.step for s in steps}:
        return Found(None, "template", reason="the template refuses a plain conversation")
    is_harmony = harmony.MARKER in tokenizer.get_vocab()
    remembering = _Remembering(tokenizer)
    best, score = Found(None, "template", reason="no typed renderer has this vocabulary's markers"), (0, 0, 0)
    with harmony.vocabulary(tokenizer) if is_harmony else nullcontext():
        for name in names():
            if name == "gpt-oss" and not is_harmony:
                continue  # its encoding is large, and made from this very vocabulary
            for renderer in _candidates(remembering, name):
                found, reached = _judge(renderer, name, chat, steps)
                if reached > score:
                    best, score = found, reached
    return best


def names() -> list[str]:
    """Names of the typed renderers, the default one and the ones that need an explicit choice left out."""
    classes = [getattr(configs, name) for name in configs.__all__]
    fields = [c.model_fields for c in classes if isinstance(c, type) and issubclass(c, configs.BaseRendererConfig)]
    found = [str(f["name"].default) for f in fields if "name" in f]
    return [n for n in dict.fromkeys(found) if n not in {"default", "auto", "custom", "PydanticUndefined"}]


def bridged(
    renderer: Speaker, prompt: list[int], output: list[int], new: list[Any], tools: list[Any] | None
) -> list[int] | None:  # Any: JSON
    """A typed renderer's extension of a sampled context, None when it has none. Raises whatever the library raises."""
    done = renderer.bridge_to_next_turn(prompt, output, new, tools=tools)
    return None if done is None else list(done.token_ids)


def _candidates(tokenizer: Any, name: str) -> Iterator[Speaker]:  # Any: a transformers tokenizer
    """The family's renderers under each of the options that a template's text may have built in."""
    config = configs.config_from_name(name)
    if config is None:
        return
    offered = type(config).model_fields
    fixed: dict[str, Any] = {"thinking_retention": "all"}  # Any: options of a config
    if "date_string" in offered:
        fixed["date_string"] = datetime.now().strftime("%d %b %Y")  # templates write the local date
    thinking: list[dict[str, Any]] = [{}, {"enable_thinking": False}, {"enable_thinking": True}]
    for chosen in thinking if "enable_thinking" in offered else thinking[:1]:
        for options in ({**fixed, **chosen}, chosen):
            try:
                made = renderers.create_renderer(tokenizer, type(config)(**options))  # pyright: ignore[reportArgumentType]
            except _NOT_THIS_FAMILY:
                continue  # the vocabulary lacks the family's tokens, or it does not offer the option
            yield harmony.Headed(made, tokenizer) if name == "gpt-oss" else made
            break


def _judge(
    renderer: Speaker, name: str, chat: ChatTemplate, steps: list[probe.Rendered]
) -> tuple[Found, tuple[int, int, int]]:
    """What a candidate can do, and a score: (does it speak, full renderings that agree, bridges that agree)."""
    stops = frozenset(renderer.get_stop_token_ids())
    taken = [step.ended(stops) for step in steps]
    if not all(_reads(renderer, t) for t in taken if t.step in _READ):
        return Found(None, "template", reason=f"{name} reads the template's replies differently"), (0, 0, 1)
    held = {t.step: _bridges(renderer, chat, t, stops) for t in taken}
    failed = [step.name for step, does in held.items() if step in _DECISIVE and not does]
    extends = all(held[step] for step in _READ) and all(held[s] is not False for s in held if s in _DECISIVE)
    differs = [t.step.name for t in taken if _rendered(renderer, t) != t.canonical]
    reason = "; ".join([f"bridge fails: {n}" for n in failed] + [f"renders differently: {n}" for n in differs])
    score = (1, len(taken) - len(differs), sum(map(bool, held.values())))
    return Found(renderer, name, renders=not differs, bridges=not failed, extends=extends, reason=reason), score


_READ = (script.TEXT, script.CALL)
_DECISIVE = (*script.DECISIVE_TEXT, *script.DECISIVE_CALLS)


def _reads(renderer: Speaker, taken: probe.Taken) -> bool:
    """Whether the parser gives back the reply that the template wrote."""
    specs = plain.specs(taken.step.tools)
    try:
        read = renderer.parse_response(taken.output, tools=specs, prompt_ids=taken.prompt)
        parts = from_renderer(read, taken.step.tools, lambda _: "").parts
    except _NOT_THIS_FAMILY:
        return False
    return _plainly(parts) == _plainly(taken.step.reply.parts)


def _plainly(parts: tuple[Part, ...]) -> list[Any]:  # Any: JSON
    """Without the ids of calls and the white space of their JSON."""
    return [(p.name, json.loads(p.arguments)) if isinstance(p, ToolCall) else p for p in parts]


def _rendered(renderer: Speaker, taken: probe.Taken) -> list[int] | None:
    request, specs = plain.chat(taken.step.request), plain.specs(taken.step.tools)
    try:
        return renderer.render_ids(request, tools=specs, add_generation_prompt=True)
    except _NOT_THIS_FAMILY:
        return None


def _bridges(renderer: Speaker, chat: ChatTemplate, taken: probe.Taken, stops: frozenset[int]) -> bool | None:
    """Whether the renderer's bridge is faithful on a step; None where it has none."""
    step = taken.step
    new, specs = plain.chat(step.request, len(step.history) + 1), plain.specs(step.tools)
    try:
        ids = bridged(renderer, taken.prompt, taken.output, new, specs)
    except _NOT_THIS_FAMILY:
        return None
    return None if ids is None else probe.is_faithful(chat, taken, ids, stops)
