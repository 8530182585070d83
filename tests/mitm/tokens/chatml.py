"""A tokenizer of 258 ids with a chat template of its own, for what no typed renderer knows."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML as SmolLM2 has it: no tools, no reasoning."""
COUNTING = "{{ messages | length }} messages\n" + CHATML
"""A template whose head changes with every message: a longer history does not extend a shorter one."""
FORGETFUL = CHATML.replace("{{ m.content }}", "{% if not loop.last and m.role == 'assistant' %}...{% else %}{{ m.content }}{% endif %}")  # fmt: skip  # noqa: E501 - one expression of the template language
"""A template that drops what the assistant said earlier, as families that strip old reasoning do."""
REFUSING = "{{ raise_exception('no') }}"


def byte_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """One id for each byte, and ChatML's two special tokens (256 begins a turn, 257 ends it)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue] - the stub has no setter
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue] - the stub has no setter
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)
