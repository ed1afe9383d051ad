"""Where answers lie in Redis: a hash each, and beside them what a tenant's answers take together.

The clear fields of a hash are keyed hashes and ids, which tell nothing to one who lacks the secret key; all else is
sealed before it comes here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha1
from importlib import resources
from typing import Final, Literal, cast
from uuid import UUID

from gateway.admission.redis import RedisClient, Script

PREFIX: Final = "ac:"
"""Of all keys of this room."""
BODY, TEXT = "b", "q"
"""Fields: the sealed entry, the sealed text."""
TENANT, PARTITION = "t", "p"
"""Fields that the index reads; only entries that can be found by their meaning have them."""
ROUTE, VERSION, TAGS, END_USER, ORIGIN = "r", "m", "g", "u", "o"
"""Fields to purge by. TAGS: several, with a space between."""
ENTRY_BYTES: Final = 1200
"""What Redis needs for an entry beside its values, about."""

Kept = Literal["KEPT", "TOO_LARGE", "FULL", "PURGED"]


def _script(name: str, flags: bytes = b"") -> Script:
    files = resources.files("gateway.cache")
    source = b"\n".join(files.joinpath(f"{part}.lua").read_bytes() for part in ("account", name))
    source = source.replace(b"#!lua", b"#!lua" + flags, 1)
    return Script(f"answer cache {name}", source, sha1(source, usedforsecurity=False).hexdigest().encode())


# What forgets must do so in a Redis that is full, too.
PUT, REMOVE = SCRIPTS = (_script("put"), _script("remove", b" flags=allow-oom"))


@dataclass(frozen=True, slots=True)
class Put:
    """An entry to be kept."""

    tenant_id: UUID
    exact: str
    mark: bytes
    """Of the last purge, as it was when the question came."""
    ttl_s: int
    most_bytes: int
    """Of the tenant's entries together."""
    fields: Mapping[str, str | bytes]
    indexed_bytes: int = 0
    """What the index copies."""


class Store:
    """Raises RedisUnavailable and RedisError from each step."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def entry(self, tenant_id: UUID, exact: str) -> bytes | None:
        """Sealed."""
        return cast("bytes | None", await self._redis.issue("HGET", entry_key(tenant_id, exact), BODY))

    def mark(self, tenant_id: UUID) -> asyncio.Future[bytes | None]:
        """Of the tenant's last purge."""
        return self._redis.issue("GET", mark_key(tenant_id))

    async def put(self, put: Put) -> tuple[Kept, int]:
        """What became of it, and how many entries went for it."""
        pairs = [part for pair in put.fields.items() for part in pair]
        size = sum(len(part.encode() if isinstance(part, str) else part) for part in pairs)
        reply = await self._redis.run(
            PUT,
            (*_keys(put.tenant_id, put.exact), mark_key(put.tenant_id)),
            (
                *self._head(put.tenant_id, put.exact),
                put.mark,
                put.ttl_s * 1000,
                ENTRY_BYTES + size + put.indexed_bytes,
                put.most_bytes,
                *pairs,
            ),
        )
        return cast(Kept, reply[0].decode()), reply[1]

    async def remove(self, tenant_id: UUID, names: Iterable[str]) -> int:
        """How many were there."""
        first, *others = names
        gone = await self._redis.run(REMOVE, _keys(tenant_id, first), (*self._head(tenant_id, first), *others))
        return int(gone)

    async def used_bytes(self, tenant_id: UUID) -> int:
        """What the tenant's entries take now."""
        await self._redis.run(REMOVE, _keys(tenant_id, ""), self._head(tenant_id, ""))
        return int(await self._redis.command("GET", _keys(tenant_id, "")[-1]) or 0)

    def _head(self, tenant_id: UUID, exact: str) -> tuple[int, str, str]:
        return self._redis.time_offset_ms, entry_key(tenant_id, ""), exact


def tenant_prefix(tenant_id: UUID) -> str:
    """Of all keys of one tenant."""
    return f"{PREFIX}{tenant_id}:"


def entry_key(tenant_id: UUID, exact: str) -> str:
    return f"{PREFIX}{tenant_id}:a:{exact}"


def mark_key(tenant_id: UUID) -> str:
    return f"{PREFIX}{tenant_id}:purged"


def _keys(tenant_id: UUID, exact: str) -> tuple[str, str, str, str, str]:
    tenant = tenant_prefix(tenant_id)
    return entry_key(tenant_id, exact), f"{tenant}made", f"{tenant}expires", f"{tenant}sizes", f"{tenant}bytes"
