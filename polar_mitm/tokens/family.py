"""Which typed renderer of the `renderers` library speaks a model's chat template: found by probing, not by name.

Invariant: a renderer is chosen only when it renders the probe conversations to the very ids that the model's own chat
template gives. Local folders and fine-tunes carry no telling name, and a wrong family would be silent.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import renderers
from renderers import configs

PROBE_TOOLS: list[dict[str, Any]] = [  # Any: JSON schema
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at a path.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"path": "/tmp/é"}}}
PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (  # Any: messages as JSON
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi  there\n"}], None),
    (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": "I look.", "tool_calls": [_CALL]},
            {"role": "tool", "content": "nothing\n", "tool_call_id": "call_1", "name": "look"},
        ],
        PROBE_TOOLS,
    ),
)
_SHORT = 64
"""Characters of a text that is worth remembering: headers and separators of a family, not messages."""
_NOT_THIS_FAMILY = (AssertionError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)


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


def find(tokenizer: Any) -> tuple[renderers.Renderer | None, str]:  # Any: a transformers tokenizer, untyped
    """The typed renderer whose probes equal the chat template's, and its name; (None, "template") when there is none.

    Reasoning of earlier turns is kept (`thinking_retention="all"`) where the family offers the choice, so that a new
    user message extends the sampled context instead of re-writing it.
    """
    expected = [_by_template(tokenizer, messages, tools) for messages, tools in PROBES]
    vocabulary = tokenizer.get_vocab()
    remembering = _Remembering(tokenizer)
    for name in _names():
        if name == "gpt-oss" and "<|channel|>" not in vocabulary:
            continue  # this renderer downloads its encoding when it is made: only for a model that is one
        renderer = _candidate(remembering, name)
        if renderer is not None and _agrees(renderer, expected):
            return renderer, name
    return None, "template"


def by_template(
    tokenizer: Any, messages: list[Any], tools: list[Any] | None, *, prompt: bool = True
) -> list[int]:  # Any: JSON
    """Ids of the model's own chat template, with the generation prompt unless `prompt` is False."""
    return list(
        tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
    )


def _by_template(tokenizer: Any, messages: list[Any], tools: list[Any] | None) -> list[int] | None:  # Any: JSON
    try:
        return by_template(tokenizer, messages, tools)
    except Exception:  # noqa: BLE001 - jinja templates raise anything; the probe then cannot be compared
        return None


def _names() -> list[str]:
    """Names of the typed renderers, the default one and the ones that need an explicit choice left out."""
    classes = [getattr(configs, name) for name in configs.__all__]
    fields = [c.model_fields for c in classes if isinstance(c, type) and issubclass(c, configs.BaseRendererConfig)]
    names = [str(f["name"].default) for f in fields if "name" in f]
    return [n for n in dict.fromkeys(names) if n not in {"default", "auto", "custom", "PydanticUndefined"}]


def _candidate(tokenizer: Any, name: str) -> renderers.Renderer | None:  # Any: a transformers tokenizer
    for options in ({"thinking_retention": "all"}, {}):
        try:
            config = configs.config_from_name(name)
            if config is not None:
                return renderers.create_renderer(tokenizer, type(config)(**options))  # pyright: ignore[reportArgumentType]
        except _NOT_THIS_FAMILY:
            continue  # the vocabulary lacks the family's tokens, or it does not offer the option
    return None


def _agrees(renderer: renderers.Renderer, expected: list[list[int] | None]) -> bool:
    try:
        given = [
            renderer.render_ids(messages, tools=tools, add_generation_prompt=True)  # pyright: ignore[reportArgumentType]
            for messages, tools in PROBES
        ]
    except _NOT_THIS_FAMILY:
        return False
    return None not in expected and given == expected
