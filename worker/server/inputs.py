"""Prompts as plain text or tokens: what completions and embeddings take, checked and tokenised."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from worker.protocol.errors import bad_request
from worker.server.body import invalid, shown
from worker.server.service import LONG_TEXT, ModelService
from worker.server.tokenizer import UntokenizableText

MAX_INPUTS: Final = 2048

Inputs = list[str] | list[list[int]]


def read_inputs(value: str | Sequence[str | int | list[int]], name: str, vocab_size: int) -> Inputs:
    """The texts, or the prompts' token ids, of a field that may hold one or several. Raises ApiError (400)."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise bad_request(f"{name!r} is empty. Send at least one.", param=name, code="empty_array")
    texts = [item for item in value if isinstance(item, str)]
    ids = [item for item in value if isinstance(item, int)]
    lists = [item for item in value if isinstance(item, list)]
    if len(ids) == len(value):
        lists = [ids]
    elif len(value) not in (len(texts), len(lists)):
        raise bad_request(
            f"{name!r} must be a text, a list of texts, a list of token ids, or a list of lists of token ids.",
            param=name,
            code="invalid_type",
        )
    if len(texts) > MAX_INPUTS or len(lists) > MAX_INPUTS:
        raise invalid(f"{name!r} has {len(value)} entries. At most {MAX_INPUTS} are allowed.", name)
    for token_ids in lists:
        if not token_ids:
            raise invalid(f"{name!r} holds an empty list of token ids.", name)
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise invalid(f"{name!r} holds the token id {shown(wrong)}. They are 0 to {vocab_size - 1}.", name)
    return texts or lists


async def encode_inputs(
    service: ModelService, inputs: Inputs, name: str, *, add_special: bool, may_be_empty: bool = False
) -> list[list[int]]:
    """The token ids of each. Raises ApiError (400).

    Special tokens that a text spells are special: whoever writes a whole prompt writes its template too.
    ``add_special``: whether texts get what the model wants in front.
    """
    size = 0
    for text in inputs:
        if isinstance(text, str):
            here = len(text.encode())
            service.check_text_size(here, "text", name)
            size += here
    prefix = service.tokenizer.prefix_ids if add_special else []

    def encode() -> list[list[int]]:
        return [
            [*prefix, *service.tokenizer.encode(text, allow_special=True)] if isinstance(text, str) else text
            for text in inputs
        ]

    try:
        encoded = encode() if size < LONG_TEXT else await asyncio.to_thread(encode)
    except UntokenizableText as fault:
        raise invalid(str(fault), name) from fault
    if not may_be_empty and not all(encoded):
        raise invalid(f"{name!r} holds an empty text, of which this model makes no token.", name)
    return encoded
