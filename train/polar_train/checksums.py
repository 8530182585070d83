"""Checksums of a model's tensors, by which engines that hold the same weights are known without sampling a token.

Invariant: the form is that of SGLang's /weights_checker on a CPU, the first eight bytes of a tensor's SHA-256 in hex.
It says nothing about what a tensor should be: that two are equal, or that one changed, is for the reader to conclude.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn


def checksums(model: nn.Module) -> dict[str, str]:
    """The checksum of every parameter, by its name; tied parameters come once."""
    return {name: _checksum(tensor) for name, tensor in model.named_parameters()}


def overall(sums: Mapping[str, str]) -> str:
    """One checksum over all, as SGLang makes it."""
    digest = hashlib.sha256()
    for name in sorted(sums):
        digest.update(name.encode())
        digest.update(sums[name].encode())
    return digest.hexdigest()


def _checksum(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw).digest()[:8].hex()
