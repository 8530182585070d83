"""Checksums of tensors: SHA-256, cut short, by name."""

import hashlib

import torch
from torch import nn

from polar_train.checksums import checksums, overall


def test_a_checksum_is_the_beginning_of_the_sha_256_of_the_tensors_bytes():
    """Eight bytes in hex, over the numbers as they lie in memory; checked by hand."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0]])
    raw = bytes.fromhex("0000803f00000040")  # 1.0 and 2.0 in float32, lowest byte first
    assert checksums(layer) == {"weight": hashlib.sha256(raw).hexdigest()[:16]}


def test_a_tensor_that_is_not_contiguous_counts_by_its_numbers():
    """A transposed view has the checksum of its copy."""
    layer, copy = nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    layer.weight.data = torch.arange(6.0).reshape(2, 3).T
    copy.weight.data = layer.weight.data.contiguous()
    assert checksums(layer) == checksums(copy)


def test_tied_weights_come_once():
    """The name that the model gives first."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert list(checksums(model)) == ["0.weight"]


def test_the_checksum_over_all_depends_on_names_and_not_on_their_order():
    """As SGLang makes it."""
    sums = {"b": "02", "a": "01"}
    assert overall(sums) == hashlib.sha256(b"a01b02").hexdigest()
    assert overall(dict(reversed(sums.items()))) == overall(sums) != overall({"a": "02", "b": "01"})
