"""Whether the model's own answer agrees with the one that the semantic tier had for it: its false hits, measured."""

from __future__ import annotations

import asyncio
import math
import unicodedata
from array import array
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec

from gateway.admission.redis import RedisClient
from gateway.cache.parts import Embedder
from gateway.cache.store import tenant_prefix

LEAST_COSINE: Final = 0.9
_READ: Final = 700
"""Characters, which embedders read whole."""
_KEEP_DAYS: Final = 35
_AGREED, _DISAGREED = "agreed", "disagreed"


class Agreement(msgspec.Struct, frozen=True):
    """Of the semantic hits that were asked of the model all the same."""

    agreed: int
    disagreed: int


async def agree(one: str, other: str, embedder: Embedder) -> bool:
    """Whether two answers say the same: word for word, or nearly so in meaning, of long ones their beginnings."""
    if _normal(one) == _normal(other):
        return True
    return _cosine(await embedder.embed(one[:_READ]), await embedder.embed(other[:_READ])) >= LEAST_COSINE


class Agreements:
    """Counted in Redis by tenant and day (UTC). Raises RedisUnavailable, RedisError."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def count(self, tenant_id: UUID, agreed: bool, now: datetime) -> None:
        key = _key(tenant_id, now)
        counted = self._redis.issue("ZINCRBY", key, 1, _AGREED if agreed else _DISAGREED)
        await asyncio.gather(counted, self._redis.issue("EXPIRE", key, _KEEP_DAYS * 24 * 3600))

    async def sum(self, tenant_id: UUID, now: datetime, days: int) -> Agreement:
        """Of the last ``days``, today among them."""
        asked = [
            self._redis.issue("ZMSCORE", _key(tenant_id, now - timedelta(days=before)), _AGREED, _DISAGREED)
            for before in range(days)
        ]
        found = await asyncio.gather(*asked)
        agreed, disagreed = (sum(int(scores[index] or 0) for scores in found) for index in (0, 1))
        return Agreement(agreed, disagreed)


def _key(tenant_id: UUID, day: datetime) -> str:
    return f"{tenant_prefix(tenant_id)}agreement:{day.astimezone(UTC):%Y-%m-%d}"


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _cosine(one: array[float] | bytes, other: array[float] | bytes) -> float:
    left, right = array("f", one), array("f", other)
    dot = sum(a * b for a, b in zip(left, right, strict=True))
    return dot / (math.hypot(*left) * math.hypot(*right) or 1.0)
