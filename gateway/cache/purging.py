"""Forgetting on demand: a tenant's entries by route, version, tag, end user or request; also what is being made."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from uuid import UUID

from gateway.admission.redis import RedisError, RedisUnavailable
from gateway.cache.keeping import purge_name
from gateway.cache.store import END_USER, ORIGIN, ROUTE, TAGS, VERSION, Store, entry_key, mark_key, tenant_prefix
from gateway.redis_url import asyncio_client
from gateway.secret_key import SecretKey

_PAGE: Final = 500
_MARK_S: Final = 24 * 3600
"""Longer than any request takes."""
_MARK: Final = "#!lua flags=allow-oom\nreturn redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])"
"""In a Redis that is full, too."""


class Purger:
    """Goes through the keys in Redis, rather than through any list of them: a list may have lost some.

    Raises RedisUnavailable: then perhaps not all is forgotten, and it is to be done again.
    """

    def __init__(self, url: str, store: Store, secret_key: SecretKey) -> None:
        self._url = url
        self._store = store
        self._secret_key = secret_key

    async def purge(
        self,
        tenant_id: UUID,
        *,
        route: str | None = None,
        version: str | None = None,
        tag: str | None = None,
        end_user: str | None = None,
        request_id: str | None = None,
    ) -> int:
        """Forget what has all that is given; everything, if nothing is. How many entries that were."""
        wanted = {END_USER: end_user, ORIGIN: request_id}
        for field, kind, value in ((ROUTE, "route", route), (VERSION, "version", version), (TAGS, "tag", tag)):
            wanted[field] = None if value is None else purge_name(self._secret_key, tenant_id, kind, value)
        sought = {field: value.encode() for field, value in wanted.items() if value is not None}
        prefix = entry_key(tenant_id, "")
        gone = 0
        async with self._client() as client:
            # First, so that no answer to an earlier question is kept behind this.
            await client.eval(_MARK, 1, mark_key(tenant_id), secrets.token_hex(8), _MARK_S)
            async for keys in _pages(client, prefix):
                found = await _having(client, keys, sought)
                if names := [key.decode().removeprefix(prefix) for key in found]:
                    gone += await self._store.remove(tenant_id, names)
        return gone

    async def erase_counts(self, tenant_id: UUID) -> None:
        """Of how often the semantic tier was right."""
        async with self._client() as client:
            async for keys in _pages(client, f"{tenant_prefix(tenant_id)}agreement:"):
                await client.delete(*keys)

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        import redis

        client = asyncio_client(self._url, timeout_s=10.0)
        try:
            yield client
        except (redis.RedisError, RedisError) as fault:
            raise RedisUnavailable(f"not all of the answer cache was purged; try again: {fault}") from fault
        finally:
            await client.aclose()


async def _pages(client: Any, prefix: str) -> AsyncIterator[list[bytes]]:
    cursor = 0
    while True:
        cursor, keys = await client.scan(cursor, match=f"{prefix}*", count=_PAGE)
        if keys:
            yield keys
        if not cursor:
            return


async def _having(client: Any, keys: list[bytes], sought: dict[str, bytes]) -> list[bytes]:
    """Those of ``keys`` whose entry has what is sought."""
    if not sought:
        return keys
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.hmget(key, *sought)
    found = await pipeline.execute()
    return [
        key
        for key, values in zip(keys, found, strict=True)
        if all(value in (has or b"").split() for value, has in zip(sought.values(), values, strict=True))
    ]
