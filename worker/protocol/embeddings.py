"""Embeddings: texts or tokens in, one vector for each out.

Reference: https://platform.openai.com/docs/api-reference/embeddings
"""

from __future__ import annotations

from typing import Literal

import msgspec

from worker.protocol.usage import Usage


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """``input``: a text, a list of texts, token ids, or a list of lists of token ids."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None
    """How token vectors become one: their mean (default), or the last token's."""
    add_special_tokens: bool | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """``embedding``: of length 1 (L2), as numbers, or as base64 of little-endian 32-bit floats."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage
