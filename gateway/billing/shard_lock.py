"""A lock in Redis with a lease, beside the shard that it guards. It saves work; nothing that must be right hangs on it.

In a cluster it lives on the shard's own node, and is lost with that node at worst.
"""

from __future__ import annotations

from hashlib import sha1

from gateway.admission.redis import RedisClient, RedisError, RedisUnavailable, Script
from gateway.ids import uuid7


def _script(name: str, source: bytes) -> Script:
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


_RELEASE = _script("release lock", b"return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0")


class ShardLock:
    """Held by whoever wrote its token into ``key`` first. All methods raise RedisUnavailable and RedisError."""

    def __init__(self, redis: RedisClient, key: str, *, lease_s: float) -> None:
        self._redis = redis
        self._key = key
        self._lease_ms = round(lease_s * 1000)
        self._token = uuid7().bytes

    async def acquire(self) -> bool:
        """Without waiting; False: somebody else has it."""
        reply = await self._redis.command("SET", self._key, self._token, "NX", "PX", self._lease_ms)
        return bool(reply == b"OK")

    async def release(self) -> bool:
        """False: it was lost before, or Redis cannot be told; then it ends with its lease."""
        try:
            return bool(await self._redis.run(_RELEASE, (self._key,), (self._token,)))
        except (RedisUnavailable, RedisError):
            return False
