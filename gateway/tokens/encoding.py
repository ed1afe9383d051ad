"""Text to a number of tokens, by byte-level BPE in ``tiktoken``; nothing is ever fetched.

The ranks of OpenAI's encodings come from the package ``bpe-openai``, held to the SHA-256 that ``tiktoken`` itself
checks.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import tiktoken

_LONGEST_SPACE: Final = 500_000
"""More white space in a row would overflow the stack of tiktoken's regular expressions."""
_LONG_SPACE: Final = re.compile(rf"\s{{{_LONGEST_SPACE}}}")


class EncodingUnusable(Exception):
    """An encoding cannot be made; the message says why."""


class Encoding:
    """Safe to use from several threads; counting holds the GIL for no long time."""

    def __init__(
        self,
        name: str,
        pattern: str,
        ranks: Mapping[bytes, int],
        *,
        size: int | None = None,
        special: Sequence[str] = (),
    ) -> None:
        """``pattern`` cuts text before the merges. ``size``: ids from there on stand for bytes that the vocabulary
        lacks, and that its model's tokenizer treats in a way of its own. ``special``: texts of its special tokens.
        Raises EncodingUnusable.
        """
        self.name = name
        self._size = size
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        try:
            self._encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={})
        except ValueError as fault:
            raise EncodingUnusable(f"tiktoken cannot make the encoding {name!r}: {fault}") from fault

    def count(self, text: str) -> int:
        """Tokens of ``text``, in which special tokens are plain text; where that cannot be told, its bytes: no
        tokenizer that works on bytes makes more tokens of a text."""
        if not text:
            return 0
        if len(text) >= _LONGEST_SPACE and _LONG_SPACE.search(text):
            return len(text.encode())
        ids = self._encoding.encode_ordinary(text)
        if self._size is not None and max(ids) >= self._size:
            return len(text.encode())
        return len(ids)

    def cut(self, text: str) -> tuple[int, list[str]]:
        """How many special tokens ``text`` spells, and the texts between them."""
        pieces = self._special.split(text)
        return len(pieces) - 1, pieces


@dataclass(frozen=True, slots=True)
class _Published:
    """An encoding as OpenAI publishes it in ``tiktoken``."""

    sha256: str
    pattern: str
    special: tuple[str, ...]


_PUBLISHED: Final[Mapping[str, _Published]] = {
    "cl100k_base": _Published(
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"
        r"\s+(?!\S)|\s",
        ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|endofprompt|>"),
    ),
    "o200k_base": _Published(
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ("<|endoftext|>", "<|endofprompt|>"),
    ),
}
PUBLISHED: Final = frozenset(_PUBLISHED)


def published_encoding(name: str) -> Encoding:
    """One of ``PUBLISHED``. Takes some 0.2 s of CPU time. Raises EncodingUnusable."""
    known = _PUBLISHED[name]
    # Only found, not imported: it would make encodings of its own.
    package = find_spec("bpe_openai")
    if package is None or not package.submodule_search_locations:
        raise EncodingUnusable(f"the package bpe-openai, which has the ranks of {name!r}, is not installed")
    try:
        found = Path(package.submodule_search_locations[0], "data", f"{name}.tiktoken.gz").read_bytes()
        raw = gzip.decompress(found)
    except (OSError, EOFError) as fault:
        raise EncodingUnusable(f"the package bpe-openai does not give {name!r}; install it again") from fault
    if hashlib.sha256(raw).hexdigest() != known.sha256:
        raise EncodingUnusable(f"the package bpe-openai has other ranks for {name!r} than OpenAI; install it again")
    ranks = {}
    for line in raw.splitlines():
        token, _, rank = line.partition(b" ")
        ranks[base64.b64decode(token)] = int(rank)
    return Encoding(name, known.pattern, ranks, special=known.special)
