"""The room's steps in Redis. What is written is sealed before; names of keys hold ids alone.

Of a tenant: ``pl:<tenant>:log``, the stream of its entries; ``pl:<tenant>:account``, their bytes;
``pl:<tenant>:e:<id>``, a hash for each entry with its bodies, which lists don't load; ``pl:<tenant>:x:<whose>``, when
what was erased. Scripts reach the last two by the tenant's prefix, so it takes one server, not a cluster.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from hashlib import sha1
from importlib import resources
from typing import Any, Final, NamedTuple
from uuid import UUID

from gateway.admission.redis import Argument, RedisClient, RedisError, RedisUnavailable, Script
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.promptlog.sealing import Packed

TENANTS: Final = "pl:tenants"
SLACK: Final = timedelta(hours=1)
"""How much later than trimmed keys expire by themselves, should no gateway be there to trim."""
LATEST: Final = timedelta(days=1)
"""A request that was admitted longer ago than that is logged no more."""
TRIMMED_A_CALL: Final = 500
REMOVED_A_CALL: Final = 500
_PLACE: Final = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")


def _script(name: str) -> Script:
    files = resources.files("gateway.promptlog")
    flags = b"" if name in ("append", "feedback") else b" flags=allow-oom"  # what makes room works without any
    source = b"\n".join((b"#!lua" + flags, *(files.joinpath(f"{part}.lua").read_bytes() for part in ("log", name))))
    return Script(f"prompt log {name}", source, sha1(source, usedforsecurity=False).hexdigest().encode())


APPEND, TRIM, FEEDBACK, REMOVE, MARK, HEADS, ORPHANS = SCRIPTS = tuple(
    _script(name) for name in ("append", "trim", "feedback", "remove", "mark", "heads", "orphans")
)


class Row(NamedTuple):
    """An entry of the stream."""

    place: str
    request_id: UUID
    metadata: bytes


class Bodies(NamedTuple):
    request: bytes | None
    response: bytes | None


class Store:
    """Raises RedisUnavailable from each step; it may have been done all the same, and can be done again."""

    def __init__(self, redis: RedisClient) -> None:
        self._redis = redis

    async def append(self, tenant_id: UUID, policy: PromptLogPolicy, entries: Sequence[Packed]) -> int:
        """How many are in the log now; those that are not were erased before they came."""
        arguments: list[Argument] = [*_limits(policy), str(tenant_id)]
        for entry in entries:
            admitted_ms = int(entry.admitted_at.timestamp() * 1000)
            arguments += [str(entry.request_id), admitted_ms, entry.end_user or ""]
            arguments += [entry.metadata, entry.request, entry.response]
        return int(await self._run(APPEND, tenant_id, *arguments, more_keys=(TENANTS,)))

    async def trim(self, tenant_id: UUID, policy: PromptLogPolicy) -> int:
        """Bring the log to the policy's retention; returns how many entries went."""
        gone, more, going_on = 0, 1, b""
        while more:
            arguments = (*_limits(policy), str(tenant_id), going_on)
            step, more, going_on = await self._run(TRIM, tenant_id, *arguments, more_keys=(TENANTS,))
            gone += step
        return gone

    async def tenants(self) -> list[UUID]:
        """Those that have a log."""
        return [UUID(member.decode()) for member in await self._command("SMEMBERS", TENANTS)]

    async def rows(
        self, tenant_id: UUID, *, oldest: str = "-", newest: str = "+", count: int, newest_first: bool = True
    ) -> list[Row]:
        """``oldest``, ``newest``: a place, a time in ms, or ``(`` before either to leave itself out."""
        log = _prefix(tenant_id) + "log"
        if newest_first:
            found = await self._command("XREVRANGE", log, newest, oldest, "COUNT", count)
        else:
            found = await self._command("XRANGE", log, oldest, newest, "COUNT", count)
        return [_row(place, fields) for place, fields in found]

    async def row(self, tenant_id: UUID, request_id: UUID) -> Row | None:
        place = await self._command("HGET", _hash(tenant_id, request_id), "s")
        if place is None:
            return None
        found = await self.rows(tenant_id, oldest=place.decode(), newest=place.decode(), count=1)
        return found[0] if found else None

    async def newest_place(self, tenant_id: UUID) -> str | None:
        found = await self.rows(tenant_id, count=1)
        return found[0].place if found else None

    async def bodies(self, tenant_id: UUID, request_ids: Sequence[UUID]) -> list[Bodies]:
        found = await self._of_each("HMGET", tenant_id, request_ids, "q", "a")
        return [Bodies(*bodies) for bodies in found]

    async def feedback(self, tenant_id: UUID, request_ids: Sequence[UUID]) -> list[bytes | None]:
        return await self._of_each("HGET", tenant_id, request_ids, "f")

    async def attach_feedback(self, tenant_id: UUID, request_id: UUID, sealed: bytes) -> bool:
        """Whether there is such an entry."""
        return bool(await self._run(FEEDBACK, tenant_id, str(request_id), sealed))

    async def mark_erased(self, tenant_id: UUID, whose: str) -> None:
        """Write nothing any more of requests admitted until now. ``whose``: '' for all of the tenant's, an end user's
        hash, or a request's id.
        """
        await self._run(MARK, tenant_id, whose, round(LATEST.total_seconds() * 1000))

    async def heads(self, tenant_id: UUID, after: str, newest: str, count: int) -> list[tuple[str, UUID]]:
        """Places after ``after`` and up to ``newest``, and the keys that sealed what is there, oldest first."""
        found = await self._run(HEADS, tenant_id, after, newest, count)
        return [(found[i].decode(), UUID(bytes=found[i + 1])) for i in range(0, len(found), 2)]

    async def remove(self, tenant_id: UUID, places: Sequence[str]) -> int:
        removed = 0
        for start in range(0, len(places), REMOVED_A_CALL):
            removed += await self._run(REMOVE, tenant_id, *places[start : start + REMOVED_A_CALL])
        return removed

    async def remove_orphans(self, tenant_id: UUID) -> int:
        """Bodies whose entry Redis evicted. Goes through all names in Redis."""
        removed, cursor = 0, b"0"
        while True:
            pattern = _prefix(tenant_id) + "e:*"
            cursor, names = await self._command("SCAN", cursor, "MATCH", pattern, "COUNT", REMOVED_A_CALL)
            if names:
                removed += await self._run(ORPHANS, tenant_id, *names)
            if cursor == b"0":
                return removed

    async def bytes_of(self, tenant_id: UUID) -> int:
        """What the tenant's log takes."""
        return int(await self._command("HGET", _prefix(tenant_id) + "account", "bytes") or 0)

    async def latest_after(self, tenant_id: UUID) -> timedelta:
        """How long after its admission, at most, an entry of the tenant's was written."""
        return timedelta(milliseconds=int(await self._command("HGET", _prefix(tenant_id) + "account", "late") or 0))

    async def _run(self, script: Script, tenant_id: UUID, *arguments: Argument, more_keys: tuple[str, ...] = ()) -> Any:
        prefix = _prefix(tenant_id)
        keys = (prefix + "log", prefix + "account", *more_keys)
        try:
            return await self._redis.run(script, keys, (self._redis.time_offset_ms, prefix, *arguments))
        except RedisError as fault:
            raise RedisUnavailable(f"{script.name}: {fault}") from fault

    async def _of_each(self, command: str, tenant_id: UUID, request_ids: Sequence[UUID], *fields: str) -> list[Any]:
        issued = [self._redis.issue(command, _hash(tenant_id, id), *fields) for id in request_ids]
        try:
            return await asyncio.gather(*issued)
        except RedisError as fault:
            raise RedisUnavailable(f"{command}: {fault}") from fault

    async def _command(self, *arguments: Argument) -> Any:
        try:
            return await self._redis.command(*arguments)
        except RedisError as fault:
            raise RedisUnavailable(f"{arguments[0]!r}: {fault}") from fault


def is_place(text: str) -> bool:
    """Of an entry; before the first one that there can be, Redis takes no place for an end."""
    return _PLACE.fullmatch(text) is not None and text.strip("0-") != ""


def _limits(policy: PromptLogPolicy) -> tuple[int, int, int, int]:
    keep = timedelta(days=policy.retention_days)
    return _ms(keep), policy.max_bytes, _ms(SLACK), TRIMMED_A_CALL


def _ms(span: timedelta) -> int:
    return span // timedelta(milliseconds=1)


def _prefix(tenant_id: UUID) -> str:
    return f"pl:{tenant_id}:"


def _hash(tenant_id: UUID, request_id: UUID) -> str:
    return f"{_prefix(tenant_id)}e:{request_id}"


def _row(place: bytes, fields: list[bytes]) -> Row:
    named = dict(zip(fields[::2], fields[1::2], strict=True))
    return Row(place.decode(), UUID(named[b"r"].decode()), named[b"m"])


def place_at(moment: datetime, later: timedelta) -> str:
    """The first place of an entry that was written so much later than ``moment``, or earlier."""
    return str(max(0, int((moment.timestamp() + later.total_seconds()) * 1000)))
