"""A short name for what a tokenizer's ids mean, by which a batch and a model are seen to be of one vocabulary.

Invariant: two tokenizers have the same fingerprint exactly when every id stands for the same token in both, added
tokens included, however and by which version of a library they were saved. Chat templates, merges and settings are
left out: they decide which ids are written, not what an id means.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np


def fingerprint(tokenizer: Any) -> str:  # Any: a transformers tokenizer, untyped
    """The number of its tokens and a digest of them, e.g. "257-0d1f2a3b4c5d6e7f"."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    pairs = sorted((index, token) for token, index in vocabulary.items())
    ids = np.array([index for index, _ in pairs], np.int64)
    tokens = "\0".join(token for _, token in pairs).encode("utf-8", "surrogatepass")
    digest = blake2b(ids.astype("<i8").tobytes() + tokens, digest_size=8)
    return f"{len(vocabulary)}-{digest.hexdigest()}"
