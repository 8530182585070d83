"""The bytes that single tokens stand for, which need not be whole characters.

Invariant: the bytes of the tokens of a text, joined, are the text in UTF-8 (but for white space that a tokenizer adds
at the beginning of every text). Knows the two ways in which vocabularies write bytes: byte-level alphabets (GPT-2 and
most since) and SentencePiece with byte fallback.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""How SentencePiece writes a space."""


def bytes_of(tokenizer: Any, token: int) -> bytes:  # Any: a transformers tokenizer, untyped
    """The bytes of a token id; of an added (special) token, its name."""
    piece = str(tokenizer.convert_ids_to_tokens(int(token)))
    if int(token) in tokenizer.added_tokens_decoder:
        return piece.encode()
    alphabet = byte_alphabet()
    if _is_byte_level(tokenizer) and all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    if fallback := _BYTE_TOKEN.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    return piece.replace(_SPACE, " ").encode("utf-8", "replace")


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte: those that print stand for themselves, the rest follow from 256."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(b): b for b in printing} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _is_byte_level(tokenizer: Any) -> bool:  # Any: a transformers tokenizer
    return "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
