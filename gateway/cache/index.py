"""The semantic tier's index in Redis: within one partition, the texts nearest to another by their vectors' cosine.

The vectors of one embedder have an index and a field of their own, so those of another are never compared with them.
The index compares all of a partition (FLAT), which misses nothing; ten thousand entries take a few milliseconds.
"""

from __future__ import annotations

import re
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog

from gateway.admission.redis import RedisClient, RedisError
from gateway.cache.store import PARTITION, PREFIX, TENANT, TEXT, entry_key
from gateway.redis_url import asyncio_client

_NEAREST: Final = 5
"""Candidates for the guards: the nearest may be a near miss where the next one is the same."""
_TIMEOUT_MS: Final = 40
_BESIDE_BYTES: Final = 600
_QUERY: Final = "(@{tenant}:{{$tenant}} @{partition}:{{$partition}})=>[KNN {count} @{field} $vector AS distance]"
_log = structlog.get_logger(__name__)


class Match(msgspec.Struct, frozen=True):
    exact: str
    """Name of the entry."""
    similarity: float
    """Cosine."""
    text: bytes
    """Sealed."""


class SemanticIndex:
    """Of one embedder. ``url``: of the same Redis as ``redis``, for administration."""

    def __init__(self, redis: RedisClient, url: str, embedder: str, dimensions: int) -> None:
        slug = f"{re.sub(r'[^a-z0-9]+', '_', embedder.lower())}_{dimensions}"
        self.name = f"{PREFIX}index_{slug}"
        self.field = f"v_{slug}"
        self.available: bool | None = None
        """None: not known yet."""
        self.fault: str | None = None
        """Why it is not available."""
        self._redis = redis
        self._url = url
        self._dimensions = dimensions
        named = {"tenant": TENANT, "partition": PARTITION, "count": _NEAREST, "field": self.field}
        self._query = _QUERY.format(**named) + "=>{$HYBRID_POLICY: ADHOC_BF}"

    @property
    def entry_bytes(self) -> int:
        """What it takes for an entry: a copy of the vector, and about so much beside."""
        return 4 * self._dimensions + _BESIDE_BYTES

    async def make(self) -> None:
        """Make it unless it is there, and learn whether this server can. Entries that lie there already are found as
        soon as Redis has gone through them. Raises redis.RedisError for a server that does not answer."""
        import redis
        from redis.commands.search.field import Field, TagField, VectorField
        from redis.commands.search.index_definition import IndexDefinition, IndexType

        shape = {"TYPE": "FLOAT32", "DIM": self._dimensions, "DISTANCE_METRIC": "COSINE"}
        fields: list[Field] = [TagField(TENANT), TagField(PARTITION), VectorField(self.field, "FLAT", shape)]
        definition: Any = IndexDefinition(prefix=[PREFIX], index_type=IndexType.HASH)  # type: ignore[no-untyped-call]
        client = asyncio_client(self._url, timeout_s=5.0)
        try:
            await client.ft(self.name).create_index(fields, definition=definition)
        except redis.ResponseError as fault:
            if "already exists" not in str(fault).lower():
                self._is_off(str(fault))
                return
        finally:
            await client.aclose()
        self.available, self.fault = True, None

    async def nearest(self, tenant_id: UUID, partition: str, vector: bytes) -> list[Match] | None:
        """Nearest first; None: there is no index, or no such thing as one. Raises RedisUnavailable, RedisError."""
        parameters = ("tenant", tenant_id.hex, "partition", partition, "vector", vector)
        try:
            reply = await self._redis.issue(
                "FT.SEARCH",
                self.name,
                self._query,
                *("PARAMS", len(parameters), *parameters),
                *("SORTBY", "distance", "ASC"),
                *("RETURN", 2, "distance", TEXT),
                *("LIMIT", 0, _NEAREST),
                *("TIMEOUT", _TIMEOUT_MS),
                *("DIALECT", 2),
            )
        except RedisError as fault:
            if _is_missing(str(fault)):
                return None
            raise
        return _matches(reply, len(entry_key(tenant_id, "")))

    def _is_off(self, fault: str) -> None:
        if self.available is not False:
            _log.warning("semantic_cache_off", reason=fault, remedy="use Redis 8, or Redis Stack, and its database 0")
        self.available, self.fault = False, fault


def _matches(reply: list[Any], prefix_length: int) -> list[Match]:
    """Of a count, and a key and a list of fields and values for each document; of one that is just gone, no list."""
    found = []
    for key, pairs in zip(reply[1::2], reply[2::2], strict=True):
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True)) if pairs else {}
        distance, text = fields.get(b"distance"), fields.get(TEXT.encode())
        if distance is not None and text is not None:
            found.append(Match(key.decode()[prefix_length:], 1.0 - float(distance), text))
    return found


def _is_missing(fault: str) -> bool:
    told = fault.lower()
    return any(words in told for words in ("no such index", "unknown index name", "unknown command"))
