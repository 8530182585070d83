"""Every family: which renderer is found, how it bridges, and that each bridged prompt says what the request says."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from polar_mitm.conversation import Text, ToolCall, ToolResult
from polar_mitm.tokens import Template, Tokens, plain, probe, script
from tests.bench.provisions import ROOT
from tests.mitm.tokens.families import CASES, Case, tokenizer_of

each = pytest.mark.parametrize("case", CASES, ids=[case.template for case in CASES])


@cache
def template_of(case: Case) -> Template:
    return Template(tokenizer_of(case))


def independently(tokenizer: Any, ids: Tokens) -> str:
    """The text of ids by nobody's decoder: added tokens by name, the others as the bytes of GPT-2's alphabet."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    alphabet = {chr(b): b for b in printing} | {chr(256 + place): byte for place, byte in enumerate(others)}
    added = {token: str(it.content) for token, it in tokenizer.added_tokens_decoder.items()}
    pieces = [tokenizer.backend_tokenizer.id_to_token(int(i)) for i in ids]
    joined = b"".join(
        added[int(i)].encode() if int(i) in added else bytes(alphabet[c] for c in piece)
        for i, piece in zip(ids, pieces, strict=True)
    )
    return joined.decode()


def bridge(case: Case, step: script.Step) -> tuple[Tokens, Tokens] | None:
    """(what was sampled in its context, the bridged prompt) of a step; None where there is no bridge."""
    template = template_of(case)
    rendered = probe.render(template.chat, step)
    if isinstance(rendered, str):
        return None
    taken = rendered.ended(frozenset(template.stop_ids))
    prompt, output = np.asarray(taken.prompt, np.int32), np.asarray(taken.output, np.int32)
    bridged = template.bridge(prompt, output, step.request, len(step.history) + 1, step.tools)
    return None if bridged is None else (np.concatenate([prompt, output]), bridged)


@each
def test_the_family_and_its_bridge_are_found_by_probing(case: Case) -> None:
    """No tokenizer here has a telling name."""
    template = template_of(case)
    assert (template.family, template.bridge_kind) == (case.family, case.bridge)


@each
def test_a_bridged_prompt_begins_with_what_was_sampled(case: Case) -> None:
    """On every scripted step that is bridged at all."""
    made = [bridge(case, step) for step in script.ALL]
    assert any(made)
    assert all(np.array_equal(it[1][: len(it[0])], it[0]) for it in made if it)


@each
def test_a_bridged_prompt_decoded_by_others_says_the_new_messages_as_the_template_does(case: Case) -> None:
    """What stands behind the reply is the end of the template's own text, with each new message once, in order."""
    tokenizer = tokenizer_of(case)
    for step in script.ALL:
        if (made := bridge(case, step)) is None:
            continue
        added = independently(tokenizer, made[1][len(made[0]) :])
        chat = template_of(case).chat
        said = tokenizer.apply_chat_template(
            plain.chat(step.request, 0, chat.shape),
            tools=plain.specs(step.tools),
            add_generation_prompt=True,
            tokenize=False,
        )
        assert said.endswith(added), step.name
        words = [p.text.split()[0] for m in step.new for p in m.parts if isinstance(p, Text | ToolResult)]
        places = [added.find(word) for word in words]
        assert places == sorted(places), step.name
        assert -1 not in places, step.name
        assert all(said.count(word) == added.count(word) for word in words), step.name


@each
def test_a_cut_reply_is_extended_with_its_missing_end(case: Case) -> None:
    """Where a turn ends by a marker, the bridge adds it as context behind a length ending."""
    whole = next(step for step in script.DECISIVE_TEXT if bridge(case, step))
    cut = replace(whole, cut=True)
    template, made, ended = template_of(case), bridge(case, cut), bridge(case, whole)
    assert made is not None
    assert ended is not None
    assert len(made[0]) == len(ended[0]) - (ended[0][-1] in template.stop_ids)
    added = made[1][len(made[0]) :][:1]
    assert not template.is_plain(added)


@each
def test_a_typed_family_reads_the_calls_that_its_template_writes(case: Case) -> None:
    """Name and arguments come back; without a typed renderer they stay text."""
    template = template_of(case)
    rendered = probe.render(template.chat, script.CALL)
    if isinstance(rendered, str):
        assert template.found.renderer is None  # a template without calls has no typed family
        return
    taken = rendered.ended(frozenset(template.stop_ids))
    output, prompt = np.asarray(taken.output, np.int32), np.asarray(taken.prompt, np.int32)
    calls = [p for p in template.parse(output, prompt, script.CALL.tools).parts if isinstance(p, ToolCall)]
    expected = [] if template.found.renderer is None else [("look", '{"path": "src/main"}')]
    assert [(call.name, call.arguments) for call in calls] == expected


def test_the_page_of_families_tells_what_was_found() -> None:
    """docs/families.md has one row for each case, with its family and its bridge."""
    page = (ROOT / "docs" / "families.md").read_text("utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", page, re.MULTILINE)
    told = {name: (tokenizer.strip(), family.strip(), bridge.strip()) for name, tokenizer, family, bridge in rows}
    assert told == {
        c.template: ("synthetic" if c.tokenizer == "synthetic" else "real", c.family, c.bridge) for c in CASES
    }
