"""Text to token ids and back, from the vocabulary inside a GGUF file.

Byte-level BPE runs in ``tiktoken``: for vocabularies whose merges stand in the order of the ids it makes the very ids
of the reference implementation (Hugging Face ``tokenizers``), several times faster. The rare text that holds a byte
which the vocabulary lacks goes to the reference itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import tiktoken

if TYPE_CHECKING:
    import tokenizers

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
"""GGUF's token types: those that steer the model and show no text; and whole words added to the vocabulary."""

_SPLIT_PATTERNS: Final[Mapping[str, str]] = {
    # Each digit alone, then GPT-2's words. White space before a digit is one piece, because digits part first.
    "smollm": r"'(?:s|t|re|ve|m|ll|d)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+",
}
"""GGUF's ``tokenizer.ggml.pre`` -> the pattern that cuts text into pieces before the merges."""

# tiktoken's regular expressions overflow their stack at about a million white-space characters in a row.
_LONGEST_SPACE: Final = 500_000
_LONG_SPACE: Final = re.compile(rf"\s{{{_LONGEST_SPACE}}}")


class UnsupportedTokenizer(ValueError):
    """The file's tokenizer is of a kind that can't be reproduced exactly; the message says which."""


class UntokenizableText(ValueError):
    """The text can't be turned into tokens; the message says why, for the one who sent it."""


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level BPE vocabulary (GPT-2's), as character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}


def _list_of(kind: type, metadata: Mapping[str, Any], name: str) -> list[Any]:
    found = metadata[f"tokenizer.ggml.{name}"]
    if type(found) is not list or any(type(item) is not kind for item in found):
        raise UnsupportedTokenizer(f"tokenizer.ggml.{name} is no list of {kind.__name__}")
    return found


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads; encoding holds the GIL for no long time.

    Attributes:
        vocab_size: every id is below it.
        special_tokens: text -> id of the tokens that only a template may place.
        bos_token, eos_token: their texts, empty if the model has none.
        longest_token: bytes of the longest token, so that text of n bytes makes at least n / longest_token tokens.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        token_types: Sequence[int],
        pre: str,
        *,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        """``tokens``: byte-level spelling by id; ``merges``: "left right", best first; ``token_types`` and ``pre``:
        as GGUF has them. Raises UnsupportedTokenizer.
        """
        if pre not in _SPLIT_PATTERNS:
            known = ", ".join(sorted(_SPLIT_PATTERNS))
            raise UnsupportedTokenizer(f"pre-tokenizer {pre!r} is not supported (these are: {known})")
        if not tokens or len(token_types) != len(tokens):
            raise UnsupportedTokenizer(f"{len(tokens)} tokens with {len(token_types)} types are no vocabulary")
        for token_id in (bos_token_id, eos_token_id):
            if token_id is not None and not (type(token_id) is int and 0 <= token_id < len(tokens)):
                raise UnsupportedTokenizer(f"the vocabulary of {len(tokens)} tokens has no token {token_id!r}")
        self.vocab_size = len(tokens)
        self.special_tokens = {
            text: at for at, text in enumerate(tokens) if token_types[at] in (_CONTROL, _USER_DEFINED)
        }
        self.bos_token = "" if bos_token_id is None else tokens[bos_token_id]
        self.eos_token = "" if eos_token_id is None else tokens[eos_token_id]
        self._tokens, self._merges = tokens, merges

        ranks: dict[bytes, int] = {}
        self._bytes: list[bytes] = []
        alphabet = _byte_alphabet()
        special_ids = set(self.special_tokens.values())
        for at, text in enumerate(tokens):
            if at in special_ids:
                try:
                    spelled = text.encode()
                except UnicodeEncodeError:
                    spelled = b""
                if not spelled:
                    raise UnsupportedTokenizer(f"special token {at} ({text!r}) is no text that a template can place")
                self._bytes.append(spelled if token_types[at] == _USER_DEFINED else b"")
                continue
            try:
                spelled = bytes([alphabet[character] for character in text])
            except KeyError:
                raise UnsupportedTokenizer(f"token {at} ({text!r}) is not spelled in the byte-level alphabet") from None
            self._bytes.append(spelled)
            ranks[spelled] = at
        self.longest_token = max(map(len, self._bytes))
        self._check_merges(special_ids)

        # tiktoken wants all 256 bytes. Those the vocabulary lacks get ids past its end, by which they are noticed.
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
        ranks |= {bytes([byte]): self.vocab_size + at for at, byte in enumerate(missing)}
        self._encoding = tiktoken.Encoding(
            "gguf", pat_str=_SPLIT_PATTERNS[pre], mergeable_ranks=ranks, special_tokens={}
        )
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "((?!))")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from the ``tokenizer.ggml.*`` entries. Raises UnsupportedTokenizer, and KeyError for a missing one."""
        model = metadata.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise UnsupportedTokenizer(f"tokenizer model {model!r} is not supported, only byte-level BPE ('gpt2') is")
        tokens = _list_of(str, metadata, "tokens")
        token_types = _list_of(int, metadata, "token_type") if "tokenizer.ggml.token_type" in metadata else []
        pre = metadata.get("tokenizer.ggml.pre", "")
        if type(pre) is not str:
            raise UnsupportedTokenizer("tokenizer.ggml.pre is no text")
        return cls(
            tokens,
            _list_of(str, metadata, "merges"),
            token_types or [1] * len(tokens),
            pre,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
        )

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of ``text``; nothing is added in front.

        Without ``allow_special`` the text of a special token is plain text like any other, and no special id can
        come out. Raises UntokenizableText.
        """
        pieces = self.split_special(text) if allow_special else [text]
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode_plain(piece)
        return ids

    def split_special(self, text: str) -> list[str | int]:
        """``text`` cut at its special tokens: plain pieces as text, special tokens as ids. No piece is empty."""
        pieces = self._special.split(text)
        return [self.special_tokens[piece] if at % 2 else piece for at, piece in enumerate(pieces) if piece]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that ``ids`` stand for; control tokens stand for none. May begin or end inside a character."""
        table = self._bytes
        return b"".join([table[at] for at in ids])

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        if len(text) >= _LONGEST_SPACE and _LONG_SPACE.search(text):
            raise UntokenizableText(f"The text has more than {_LONGEST_SPACE} white-space characters in a row.")
        ids = self._encoding.encode_ordinary(text)
        if max(ids) < self.vocab_size:
            return ids
        return self._reference.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _reference(self) -> tokenizers.Tokenizer:
        """The reference implementation. It drops a byte that the vocabulary lacks before it merges."""
        import tokenizers
        from tokenizers import models
        from tokenizers.pre_tokenizers import ByteLevel, Digits
        from tokenizers.pre_tokenizers import Sequence as Steps

        vocabulary = {text: at for at, text in enumerate(self._tokens)}
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in self._merges)]
        reference = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        reference.pre_tokenizer = Steps([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        return reference

    def _check_merges(self, special_ids: set[int]) -> None:
        ids = {text: at for at, text in enumerate(self._tokens) if at not in special_ids}
        previous = -1
        for merge in self._merges:
            left, _, right = merge.partition(" ")
            at = ids.get(left + right, -1)
            if at <= previous:
                raise UnsupportedTokenizer(f"merge {merge!r} is out of the order of the ids")
            previous = at
