"""Encodings are OpenAI's own, made without a network, and count what tiktoken counts."""

from __future__ import annotations

import socket
from typing import Any, NoReturn

import pytest
import tiktoken_ext.openai_public
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tokens import encoding as encoding_module
from gateway.tokens.cache import CountCache
from gateway.tokens.encoding import PUBLISHED, Encoding, EncodingUnusable, published_encoding


@pytest.fixture(scope="module")
def o200k() -> Encoding:
    return published_encoding("o200k_base")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_it_is_made_without_a_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    made = published_encoding(name)
    # As OpenAI's own page shows it.
    assert made.count("tiktoken is great!") == 6
    assert made.count("antidisestablishmentarianism") == 6
    assert made.count("2 + 2 = 4") == 7
    assert made.count("") == 0
    # A special token that a message spells is plain text.
    assert made.count("<|endoftext|>") == 7


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_text_is_cut_as_tiktoken_cuts_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, str] = {}

    def no_ranks(url: str, expected_hash: str) -> dict[bytes, int]:
        asked["hash"] = expected_hash
        return {}

    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", no_ranks)
    theirs = getattr(tiktoken_ext.openai_public, name)()
    ours = encoding_module._PUBLISHED[name]
    assert ours.pattern == theirs["pat_str"]
    assert ours.sha256 == asked["hash"]


def test_other_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_module.gzip, "decompress", lambda _: b"AAAA 0\n")
    with pytest.raises(EncodingUnusable, match="other ranks"):
        published_encoding("o200k_base")


def test_white_space_that_would_overflow_is_counted_by_its_bytes(o200k: Encoding) -> None:
    assert o200k.count(" " * 499_999 + "a") < 10_000
    assert o200k.count(" " * 1_500_000 + "a") == 1_500_001


def test_bytes_that_a_vocabulary_lacks_are_counted_by_the_texts_bytes() -> None:
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"\x04": 257}
    small = Encoding("small", r"\S+|\s+", ranks, size=257)
    assert small.count("abab") == 2
    assert small.count("abab\x04") == 5
    with pytest.raises(EncodingUnusable):
        Encoding("broken", "(", ranks)


@given(text=st.text(max_size=400), tenants=st.lists(st.binary(max_size=64), min_size=1, max_size=3))
@settings(max_examples=50)
def test_what_is_remembered_is_what_was_counted(o200k: Encoding, text: str, tenants: list[bytes]) -> None:
    cache = CountCache(entries=2)
    for tenant in [*tenants, *tenants]:
        assert cache.count(o200k, text, tenant) == o200k.count(text) <= len(text.encode())
    assert len(cache) <= 2


def test_a_tenant_finds_only_what_it_sent_itself(o200k: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    real = o200k.count
    monkeypatch.setattr(o200k, "count", lambda text: counted.append(text) or real(text))  # type: ignore[func-returns-value]
    cache = CountCache()
    for tenant in (b"a", b"a", b"b", b"a"):
        cache.count(o200k, "word " * 100, tenant)
    assert len(counted) == 2
