"""Text to token ids and back, from the vocabulary inside a GGUF file.

Byte-level BPE runs in ``tiktoken``: for vocabularies whose merges stand in the order of the ids it makes the very ids
of the reference implementation (Hugging Face ``tokenizers``), several times faster. The rare text that holds a byte
which the vocabulary lacks goes to the reference itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from worker.weights.vocabulary import UnsupportedTokenizer as UnsupportedTokenizer
from worker.weights.vocabulary import Vocabulary, list_of, read_tokens

if TYPE_CHECKING:
    import tokenizers

_FILL_IN_MIDDLE: Final = (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle"))
"""GGUF's names, newer and older, of the tokens that mark prefix, suffix and middle."""

# tiktoken's regular expressions overflow their stack at about a million white-space characters in a row.
_LONGEST_SPACE: Final = 500_000
_LONG_SPACE: Final = re.compile(rf"\s{{{_LONGEST_SPACE}}}")


class UntokenizableText(ValueError):
    """The text can't be turned into tokens; the message says why, for the one who sent it."""


def _fill_in_middle(metadata: Mapping[str, Any]) -> tuple[int, int, int] | None:
    ids = [_first(metadata, names) for names in _FILL_IN_MIDDLE]
    return None if None in ids else (ids[0], ids[1], ids[2])


def _first(metadata: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next(
        (found for name in names if (found := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None), None
    )


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads; encoding holds the GIL for no long time.

    Attributes:
        vocab_size: every id is below it.
        special_tokens: text -> id of the tokens that only a template may place.
        bos_token, eos_token: their texts, empty if the model has none.
        prefix_ids: what the model wants in front of a text that no template made: its bos token, or nothing.
        fill_in_middle: ids of the tokens before the prefix, before the suffix, and before what is asked for; None if
            the model has none.
        plain_tokens, pattern: what plain text is encoded with; see ``worker.weights.vocabulary.Vocabulary``.
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
        add_bos: bool = False,
        fill_in_middle: tuple[int, int, int] | None = None,
    ) -> None:
        """``tokens``: byte-level spelling by id; ``merges``: "left right", best first; ``token_types`` and ``pre``:
        as GGUF has them. Raises UnsupportedTokenizer.
        """
        vocabulary = Vocabulary(tokens, token_types, pre)
        for token_id in (bos_token_id, eos_token_id, *(fill_in_middle or ())):
            if token_id is not None and not (type(token_id) is int and 0 <= token_id < len(tokens)):
                raise UnsupportedTokenizer(f"the vocabulary of {len(tokens)} tokens has no token {token_id!r}")
        self.vocab_size = len(tokens)
        self.special_tokens = vocabulary.special_tokens
        self.bos_token = "" if bos_token_id is None else tokens[bos_token_id]
        self.eos_token = "" if eos_token_id is None else tokens[eos_token_id]
        self.prefix_ids = [bos_token_id] if add_bos and bos_token_id is not None else []
        self.fill_in_middle = fill_in_middle
        self._tokens, self._merges = tokens, merges

        self._vocabulary = vocabulary
        self.plain_tokens, self.pattern = vocabulary.plain_tokens, vocabulary.pattern
        self._bytes = vocabulary.token_bytes
        self.longest_token = max(map(len, self._bytes))
        self._special_ids = frozenset(self.special_tokens.values())
        self._check_merges(self._special_ids)
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else "((?!))")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build from the ``tokenizer.ggml.*`` entries. Raises UnsupportedTokenizer, and KeyError for a missing one."""
        tokens, token_types, pre = read_tokens(metadata)
        return cls(
            tokens,
            list_of(str, metadata, "merges"),
            token_types,
            pre,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
            add_bos=metadata.get("tokenizer.ggml.add_bos_token") is True,
            fill_in_middle=_fill_in_middle(metadata),
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
        try:
            return b"".join([table[at] for at in ids])
        except IndexError:  # a model's last ids may be padding that no vocabulary spells
            return b"".join([table[at] for at in ids if at < len(table)])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that spell one token, be it special or not; none for ids that the vocabulary lacks."""
        if token_id in self._special_ids:
            return self._tokens[token_id].encode()
        return self.decode_bytes([token_id])

    def showing(self, special: Iterable[str] | None = None) -> SpecialsShown:
        """A detokeniser that spells these special tokens too; None: all of them."""
        texts = self.special_tokens if special is None else special
        return SpecialsShown(self, {self.special_tokens[text] for text in texts if text in self.special_tokens})

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        if len(text) >= _LONGEST_SPACE and _LONG_SPACE.search(text):
            raise UntokenizableText(f"The text has more than {_LONGEST_SPACE} white-space characters in a row.")
        ids = self._vocabulary.encode(text)
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

    def _check_merges(self, special_ids: frozenset[int]) -> None:
        ids = {text: at for at, text in enumerate(self._tokens) if at not in special_ids}
        previous = -1
        for merge in self._merges:
            left, _, right = merge.partition(" ")
            at = ids.get(left + right, -1)
            if at <= previous:
                raise UnsupportedTokenizer(f"merge {merge!r} is out of the order of the ids")
            previous = at


class SpecialsShown:
    """A detokeniser that spells some special tokens, which otherwise stand for no text."""

    def __init__(self, tokenizer: Tokenizer, ids: Container[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """As ``Tokenizer.decode_bytes``."""
        tokenizer = self._tokenizer
        return b"".join([tokenizer.token_bytes(at) if at in self._ids else tokenizer.decode_bytes([at]) for at in ids])
