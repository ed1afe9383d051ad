from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator

import brotli
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.decompression import PIECE, BadCoding, decompressor


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZIP", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "bare deflate": ("deflate", bare_deflate),
    "brotli": ("br", brotli.compress),
    "zstd": ("identity, zstd", zstd.compress),
}


def pieces(name: str, packed: bytes, cut: int = PIECE) -> Iterator[bytes]:
    """What comes out piece by piece, to the end."""
    unpacking = decompressor([name])
    assert unpacking is not None
    for start in range(0, len(packed), cut):
        unpacking.feed(packed[start : start + cut])
        while piece := unpacking.take():
            yield piece
    unpacking.end()


@pytest.mark.parametrize("kind", CODINGS)
@given(data=st.binary(max_size=200), times=st.integers(1, 400), cut=st.integers(1, 50))
def test_what_was_packed_comes_out_however_it_is_cut(kind: str, data: bytes, times: int, cut: int) -> None:
    name, pack = CODINGS[kind]
    assert b"".join(pieces(name, pack(data * times), cut)) == data * times


@pytest.mark.parametrize("kind", CODINGS)
def test_few_bytes_that_grow_to_many_come_out_in_small_pieces(kind: str) -> None:
    name, pack = CODINGS[kind]
    sizes = [len(piece) for piece in pieces(name, pack(bytes(20_000_000)))]
    assert sum(sizes) == 20_000_000
    assert max(sizes) <= 4 * PIECE


@pytest.mark.parametrize("kind", CODINGS)
def test_a_body_that_is_cut_or_changed_is_refused(kind: str) -> None:
    name, pack = CODINGS[kind]
    packed = pack(b"Paris is the capital of France. " * 100)
    for broken in (packed[:-1], packed[: len(packed) // 2], packed[:1], b"\xff" * 100, packed + b"tail"):
        with pytest.raises(BadCoding):
            list(pieces(name, broken))
    assert list(pieces(name, b"")) == []


def test_members_and_frames_may_follow_one_another() -> None:
    assert b"".join(pieces("gzip", gzip.compress(b"Par") + gzip.compress(b"is") + bytes(20))) == b"Paris"
    assert b"".join(pieces("zstd", zstd.compress(b"Par") + zstd.compress(b"is"))) == b"Paris"


def test_a_frame_may_not_ask_for_a_window_of_gigabytes() -> None:
    options: dict[int, int] = {
        zstd.CompressionParameter.window_log: 27,
        zstd.CompressionParameter.content_size_flag: 0,
    }
    packer = zstd.ZstdCompressor(options=options)
    packed = packer.compress(bytes(1_000_000)) + packer.flush()
    with pytest.raises(BadCoding):
        list(pieces("zstd", packed))


@pytest.mark.parametrize("name", ["compress", "aws-chunked", "gzip, gzip", "br,gzip", "\x00"])
def test_an_unknown_coding_is_refused_once_there_is_a_body(name: str) -> None:
    assert list(pieces(name, b"")) == []
    with pytest.raises(BadCoding):
        list(pieces(name, b"x"))


@pytest.mark.parametrize("codings", [[], [""], ["identity"], ["Identity, ,"]])
def test_a_plain_body_needs_nothing(codings: list[str]) -> None:
    assert decompressor(codings) is None
