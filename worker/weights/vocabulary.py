"""The vocabulary inside a GGUF file: which bytes each token stands for, and byte-level BPE over it.

Byte-level BPE runs in ``tiktoken``: for vocabularies whose merges stand in the order of the ids it makes the very ids
of the reference implementation (Hugging Face ``tokenizers``), several times faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import tiktoken

from worker.protocol.token_counting import ranks_of

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
"""GGUF's token types: those that steer the model and show no text; and whole words added to the vocabulary."""

_SPLIT_PATTERNS: Final[Mapping[str, str]] = {
    # Each digit alone, then GPT-2's words. White space before a digit is one piece, because digits part first.
    "smollm": r"'(?:s|t|re|ve|m|ll|d)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+",
}
"""GGUF's ``tokenizer.ggml.pre`` -> the pattern that cuts text into pieces before the merges."""


class UnsupportedTokenizer(ValueError):
    """The file's tokenizer is of a kind that can't be reproduced exactly; the message says which."""


def list_of(kind: type, metadata: Mapping[str, Any], name: str) -> list[Any]:
    """The list ``tokenizer.ggml.<name>``. Raises UnsupportedTokenizer, and KeyError if it is missing."""
    found = metadata[f"tokenizer.ggml.{name}"]
    if type(found) is not list or any(type(item) is not kind for item in found):
        raise UnsupportedTokenizer(f"tokenizer.ggml.{name} is no list of {kind.__name__}")
    return found


def read_tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int], str]:
    """Spellings by id, token types by id, and the name of the pre-tokenizer.

    Raises UnsupportedTokenizer, and KeyError for a missing entry.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedTokenizer(f"tokenizer model {model!r} is not supported, only byte-level BPE ('gpt2') is")
    tokens = list_of(str, metadata, "tokens")
    token_types = list_of(int, metadata, "token_type") if "tokenizer.ggml.token_type" in metadata else []
    pre = metadata.get("tokenizer.ggml.pre", "")
    if type(pre) is not str:
        raise UnsupportedTokenizer("tokenizer.ggml.pre is no text")
    return tokens, token_types or [1] * len(tokens), pre


class Vocabulary:
    """The tokens of one model. Safe to use from several threads.

    Attributes:
        tokens: how the file spells each token, by id.
        token_bytes: the bytes that each token stands for, by id; none for control tokens.
        special_tokens: text -> id of the tokens that only a template may place.
        plain_tokens: the bytes of each token that plain text can make, by id; none for special tokens.
        pattern: what cuts text into pieces before the merges, as ``tiktoken`` reads it.
    """

    def __init__(self, tokens: Sequence[str], token_types: Sequence[int], pre: str) -> None:
        """``tokens``: byte-level spelling by id; ``token_types`` and ``pre``: as GGUF has them.

        Raises UnsupportedTokenizer.
        """
        if pre not in _SPLIT_PATTERNS:
            known = ", ".join(sorted(_SPLIT_PATTERNS))
            raise UnsupportedTokenizer(f"pre-tokenizer {pre!r} is not supported (these are: {known})")
        if not tokens or len(token_types) != len(tokens):
            raise UnsupportedTokenizer(f"{len(tokens)} tokens with {len(token_types)} types are no vocabulary")
        self.tokens = tokens
        self.special_tokens = {
            text: at for at, text in enumerate(tokens) if token_types[at] in (_CONTROL, _USER_DEFINED)
        }
        self.token_bytes: list[bytes] = []
        self.plain_tokens: list[bytes] = []
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
                self.token_bytes.append(spelled if token_types[at] == _USER_DEFINED else b"")
                self.plain_tokens.append(b"")
                continue
            try:
                spelled = bytes([alphabet[character] for character in text])
            except KeyError:
                raise UnsupportedTokenizer(f"token {at} ({text!r}) is not spelled in the byte-level alphabet") from None
            self.token_bytes.append(spelled)
            self.plain_tokens.append(spelled)
        self.pattern = _SPLIT_PATTERNS[pre]
        self._encoding = tiktoken.Encoding(
            "gguf", pat_str=self.pattern, mergeable_ranks=dict(ranks_of(self.plain_tokens)), special_tokens={}
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Build from the ``tokenizer.ggml.*`` entries. Raises UnsupportedTokenizer, and KeyError for a missing one."""
        return cls(*read_tokens(metadata))

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text. An id that is not below the vocabulary's size marks a byte that has no token."""
        return self._encoding.encode_ordinary(text)


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level BPE vocabulary (GPT-2's), as character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}
