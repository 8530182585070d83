"""Undoes the content encodings of a request body, as far as a bound. Pure.

Invariant: never more than `LARGEST_BODY` bytes come out, however small what goes in (a bomb of 1 MB can hold 1 GB).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import brotli
import zstandard

from polar_mitm.errors import BadRequest, TooLarge

LARGEST_BODY = 256 * 2**20
"""Bytes; the largest prompt that any model reads is a tenth of it."""
_PIECE = 2**20


def decompress(body: bytes, encoding: str, bound: int = LARGEST_BODY) -> bytes:
    """The body without its encodings, the last of the list undone first.

    Raises BadRequest for an unknown encoding or a body that is not in it, TooLarge for more than `bound` bytes.
    """
    for name in reversed([e.strip().lower() for e in encoding.split(",")]):
        if name in {"", "identity"}:
            continue
        if name not in _DECODERS:
            raise BadRequest(f"content-encoding {name!r} is not read here: send {', '.join(_DECODERS)} or none")
        try:
            body = _DECODERS[name](body, bound)
        except (zlib.error, brotli.error, zstandard.ZstdError, EOFError) as error:
            raise BadRequest(f"the body is not {name}: {error}") from error
    return body


def check_size(size: int, bound: int = LARGEST_BODY) -> None:
    """Raises TooLarge for a body of more than `bound` bytes."""
    if size > bound:
        raise TooLarge(f"the body is larger than {bound} bytes: send a smaller one")


def _inflate(body: bytes, bound: int, wbits: int) -> bytes:
    decoder = zlib.decompressobj(wbits)
    text = decoder.decompress(body, bound + 1)
    check_size(len(text), bound)
    if not decoder.eof:
        raise EOFError("it is cut short")
    return text


def _deflate(body: bytes, bound: int) -> bytes:
    try:
        return _inflate(body, bound, 15)
    except zlib.error:
        return _inflate(body, bound, -15)  # without zlib's header, as some clients understand "deflate"


def _unbrotli(body: bytes, bound: int) -> bytes:
    decoder = brotli.Decompressor()
    pieces = [decoder.process(body, output_buffer_limit=_PIECE)]
    size = len(pieces[0])
    while not decoder.is_finished():
        check_size(size, bound)
        piece = decoder.process(b"", output_buffer_limit=_PIECE)
        if not piece:
            raise EOFError("it is cut short")
        pieces.append(piece)
        size += len(piece)
    check_size(size, bound)
    return b"".join(pieces)


def _unzstd(body: bytes, bound: int) -> bytes:
    """A body that is cut short comes out shorter, and is then no JSON."""
    with zstandard.ZstdDecompressor().stream_reader(body, read_across_frames=True) as reader:
        text = reader.read(bound + 1)
    check_size(len(text), bound)
    return text


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": lambda body, bound: _inflate(body, bound, 31),
    "x-gzip": lambda body, bound: _inflate(body, bound, 31),
    "deflate": _deflate,
    "br": _unbrotli,
    "zstd": _unzstd,
}
ENCODINGS: tuple[str, ...] = tuple(_DECODERS)
"""The names of the encodings that are read."""
