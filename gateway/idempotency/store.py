"""The room's steps in Redis, one script each. The scripts say what they do at their heads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha1
from importlib import resources
from typing import Any, Literal, cast
from uuid import UUID

from gateway.admission.redis import Argument, RedisClient, RedisError, RedisUnavailable, Script
from gateway.idempotency.scope import Scope

log = logging.getLogger(__name__)

Shared = Literal["SHARED", "KEPT", "NOT_KEPT", "LOST", "TOO_LARGE", "FULL"]


def script_of(name: str) -> Script:
    files = resources.files("gateway.idempotency")
    source = b"\n".join(files.joinpath(f"{part}.lua").read_bytes() for part in ("entry", name))
    return Script(f"idempotency {name}", source, sha1(source, usedforsecurity=False).hexdigest().encode())


BEGIN, SHARE, READ, DROP = SCRIPTS = tuple(script_of(name) for name in ("begin", "share", "read", "drop"))


@dataclass(frozen=True, slots=True)
class Rules:
    """Bounds of one deployment. Seconds and bytes; an answer's bytes are those that Redis keeps of it."""

    lease_s: float = 10.0
    """An owner that is silent for so long is dead."""
    keep_s: float = 24 * 3600.0
    """How long a complete answer is kept, from its completion."""
    linger_s: float = 10.0
    """How long an answer that is not kept can be read to its end by those who follow it."""
    max_answer_bytes: int = 8 * 1024 * 1024
    max_kept_bytes: int = 64 * 1024 * 1024
    """A tenant's entries, running ones too: over it, a complete answer is not kept."""
    max_total_bytes: int = 128 * 1024 * 1024
    """Over it, a running answer is not shared any longer."""
    max_entries: int = 1000


class Reused(Exception):
    """The idempotency key belongs to another body."""


class Lost(Exception):
    """The owner is dead, or has given the entry up."""


@dataclass(frozen=True, slots=True)
class Pieces:
    found: list[bytes]
    known: int
    """How many there are so far."""
    done: bool


class Store:
    """Raises RedisUnavailable from each step; it may have been done all the same, and can be done again."""

    def __init__(self, redis: RedisClient, rules: Rules) -> None:
        self._redis = redis
        self.rules = rules
        self._lease_ms = round(rules.lease_s * 1000)
        self._silent_ms = 6 * self._lease_ms

    async def begin(self, scope: Scope, owner: UUID) -> UUID:
        """The owner of the entry: ``owner``, or another who is to be followed. Raises Reused."""
        reply = await self._run(BEGIN, scope, owner, scope.body, self._lease_ms, self._silent_ms)
        if reply[0] == b"REUSED":
            raise Reused
        return owner if reply[0] == b"OWNER" else UUID(reply[1].decode())

    async def share(
        self, scope: Scope, owner: UUID, before: int, pieces: Sequence[bytes], *, complete: bool = False
    ) -> Shared:
        """Add ``pieces`` to the ``before`` ones that are there; renews the lease even without any."""
        rules = self.rules
        reply = await self._run(
            SHARE,
            scope,
            owner,
            self._lease_ms,
            self._silent_ms,
            before,
            int(complete),
            round(rules.keep_s * 1000),
            round(rules.linger_s * 1000),
            rules.max_answer_bytes,
            rules.max_total_bytes,
            rules.max_kept_bytes,
            rules.max_entries,
            *pieces,
        )
        return cast(Shared, reply[0].decode())

    async def read(self, scope: Scope, owner: UUID, known: int, most: int) -> Pieces:
        """At most ``most`` pieces after the ``known`` ones. Raises Lost."""
        reply = await self._run(READ, scope, owner, known, most)
        if reply[0] == b"LOST":
            raise Lost
        return Pieces(reply[2], reply[1], reply[0] == b"DONE")

    async def drop(self, scope: Scope, owner: UUID) -> bool:
        """Give the entry up; False if there was nothing to be given up."""
        return bool(await self._run(DROP, scope, owner))

    def forget(self, scope: Scope, owner: UUID) -> None:
        """As ``drop``, without waiting: for one who asked to become the owner and left before the answer."""
        asked = self._redis.run(DROP, scope.keys, self._head(scope, owner))
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # else the loop tells of it

    def _head(self, scope: Scope, owner: UUID) -> tuple[Argument, ...]:
        return self._redis.time_offset_ms, scope.hash, str(owner)

    async def _run(self, script: Script, scope: Scope, owner: UUID, *arguments: Argument) -> Any:
        try:
            return await self._redis.run(script, scope.keys, (*self._head(scope, owner), *arguments))
        except RedisError as fault:
            log.exception("%s failed", script.name)
            raise RedisUnavailable(f"{script.name}: {fault}") from fault
