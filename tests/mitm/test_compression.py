"""Bodies in every encoding that a client may send, broken ones, and bombs."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from polar_mitm.compression import check_size, decompress
from polar_mitm.errors import BadRequest, TooLarge

Pack = Callable[[bytes], bytes]
TEXT = bytes(range(256)) * 5000
PACKS: dict[str, Pack] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
    "identity": bytes,
    "": bytes,
}
encoded = pytest.mark.parametrize("name", [name for name in PACKS if name not in {"", "identity"}])


@pytest.mark.parametrize("name", PACKS)
def test_a_body_comes_out_as_it_went_in(name: str) -> None:
    """To the byte."""
    assert decompress(PACKS[name](TEXT), name) == TEXT


def test_a_zlib_stream_without_its_header_is_deflate_too() -> None:
    """Clients never agreed on what the word means."""
    packer = zlib.compressobj(wbits=-15)
    assert decompress(packer.compress(TEXT) + packer.flush(), "deflate") == TEXT


def test_several_encodings_are_undone_from_the_last() -> None:
    """In the order in which the header lists them, white space and case aside."""
    assert decompress(brotli.compress(gzip.compress(TEXT)), "GZIP, br") == TEXT


@encoded
def test_a_bomb_is_refused_before_it_goes_off(name: str) -> None:
    """No more than the bound is ever held."""
    with pytest.raises(TooLarge, match="1000 bytes"):
        decompress(PACKS[name](bytes(5_000_000)), name, 1000)


@encoded
def test_a_body_of_just_the_bound_is_read(name: str) -> None:
    """The bound is the largest size that is allowed."""
    assert decompress(PACKS[name](TEXT), name, len(TEXT)) == TEXT


@encoded
def test_garbage_is_a_bad_request(name: str) -> None:
    """Which names the encoding."""
    with pytest.raises(BadRequest, match=f"not {name}"):
        decompress(b"garbage", name)


@pytest.mark.parametrize("name", ["gzip", "deflate", "br"])
def test_a_body_that_is_cut_short_is_a_bad_request(name: str) -> None:
    """A cut zstd body comes out shorter, and is then no JSON."""
    with pytest.raises(BadRequest, match="cut short"):
        decompress(PACKS[name](TEXT)[:-3], name)


def test_an_unknown_encoding_is_a_bad_request_that_names_the_known_ones() -> None:
    """So that the reader knows what to send."""
    with pytest.raises(BadRequest, match=r"'lzma'.*gzip.*zstd"):
        decompress(b"", "lzma")


def test_a_body_over_the_bound_is_too_large() -> None:
    """413, as the providers have it."""
    check_size(10, 10)
    with pytest.raises(TooLarge) as raised:
        check_size(11, 10)
    assert raised.value.status == 413
