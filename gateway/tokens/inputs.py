"""Prompts of completions and embeddings as far as counting must know them: each is a text or a list of token ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

MOST_AROUND: Final = 32
"""Tokens that a server puts to a prompt, where nothing is known of it."""
_OUTSIDE: Final = frozenset(
    (
        *("model", "prompt", "input", "stream", "stream_options", "n", "best_of", "echo", "max_tokens", "logprobs"),
        *("temperature", "top_p", "seed", "stop", "user", "safety_identifier", "logit_bias", "presence_penalty"),
        *("frequency_penalty", "encoding_format", "dimensions"),
    )
)
"""Fields that put nothing to a prompt."""
_EMPTY: Final = frozenset((b"null", b"[]", b"{}", b'""', b"false"))

Body = Mapping[str, msgspec.Raw]


def are_texts(inputs: Sequence[bytes]) -> bool:
    return inputs[0].startswith(b'"')


def count_ids(entry: bytes) -> int:
    """Of a list that is not empty."""
    return entry.count(b",") + 1


def by_bytes(inputs: Sequence[bytes], body: Body, most: int) -> list[int]:
    """Most tokens of each; none has over ``most``.

    No tokenizer that works on bytes makes more tokens of a text than it has bytes, and JSON has no fewer.
    """
    around = MOST_AROUND + bytes_beside(body)
    texts = are_texts(inputs)
    return [min((len(entry) if texts else count_ids(entry)) + around, most) for entry in inputs]


def bytes_beside(body: Body, *, but: Collection[str] = ()) -> int:
    """Of fields that nobody knows: a server may put them to each prompt."""
    return sum(
        len(bytes(value))
        for field, value in body.items()
        if field not in _OUTSIDE and field not in but and bytes(value) not in _EMPTY
    )


def text_of(body: Body, field: str) -> str | None:
    """Empty if it is not there; None if it is no text."""
    try:
        return msgspec.json.decode(body.get(field, b"null"), type=str | None) or ""
    except (msgspec.DecodeError, RecursionError):
        return None
