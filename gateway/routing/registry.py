"""Which workers are alive: records in Redis that live as long as their heartbeats, and this replica's copy of them.

Redis keys: ``{fleet}:worker:<id>`` holds one record with a time to live, ``{fleet}:pool:<pool>`` the ids of a pool's
workers, ``{fleet}:pools`` the names of the pools. A worker is alive exactly while its record is there; the sets only
say where to look.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Any

import msgspec
import redis.asyncio
import redis.exceptions
import structlog

from gateway.redis_url import asyncio_client
from gateway.routing.route import Endpoint
from worker.protocol.fleet import WorkerRecord

REFRESH_S = 0.5
CONNECTIONS = 8
"""Heartbeats of a large fleet that come at once share these."""
_POOLS = "{fleet}:pools"

_log = structlog.get_logger(__name__)
_decoder = msgspec.json.Decoder(WorkerRecord)


class RegistryUnavailable(Exception):
    """Redis did not take or give a record."""


def _pool_key(pool: str) -> str:
    return f"{{fleet}}:pool:{pool}"


def worker_key(worker_id: str) -> str:
    return f"{{fleet}}:worker:{worker_id}"


class Registry:
    """Register, withdraw and list workers. Use as an async context manager: it keeps its copy fresh meanwhile."""

    def __init__(self, redis_url: str, *, ttl_s: float, timeout_s: float, refresh_s: float = REFRESH_S) -> None:
        self.ttl_s = ttl_s
        self._refresh_s = refresh_s
        self._timeout_s = timeout_s
        self._redis = asyncio_client(redis_url, timeout_s=timeout_s, max_connections=CONNECTIONS)
        self._records: dict[str, WorkerRecord] = {}
        self._endpoints: dict[str, list[Endpoint]] = {}
        self._changes = 0
        self._tasks = asyncio.TaskGroup()
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Registry:
        await self._tasks.__aenter__()
        # The first request should find the workers that are there; a Redis that is away is awaited in the background.
        with contextlib.suppress(RegistryUnavailable):
            await self.refresh()
        self._tasks.create_task(self._keep_fresh(), name="registry-refresh")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Asked to end, not cancelled: within the Redis client a cancellation can get lost.
        self._closing.set()
        await self._tasks.__aexit__(None, None, None)
        await self._redis.aclose()

    async def register(self, record: WorkerRecord) -> None:
        """Keep ``record`` for ``ttl_s`` from now; this replica knows it at once. Raises RegistryUnavailable."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(worker_key(record.worker_id), msgspec.json.encode(record), px=round(self.ttl_s * 1000))
        pipeline.sadd(_pool_key(record.pool), record.worker_id)
        pipeline.sadd(_POOLS, record.pool)
        await self._run(pipeline)
        self._changes += 1
        self._adopt(self._records | {record.worker_id: record})

    async def withdraw(self, worker_id: str) -> None:
        """Forget a worker. Raises RegistryUnavailable."""
        known = self._records.get(worker_id)
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.delete(worker_key(worker_id))
        if known is not None:
            pipeline.srem(_pool_key(known.pool), worker_id)
        await self._run(pipeline)
        self._changes += 1
        self._adopt({id: record for id, record in self._records.items() if id != worker_id})

    def endpoints(self, pool: str) -> list[Endpoint]:
        """The pool's workers that take requests, as of at most ``REFRESH_S`` ago (later while Redis is away)."""
        return self._endpoints.get(pool, [])

    def all(self) -> list[Endpoint]:
        """Those of all pools."""
        return [endpoint for endpoints in self._endpoints.values() for endpoint in endpoints]

    def workers(self) -> list[WorkerRecord]:
        """Every live worker, draining ones too."""
        return list(self._records.values())

    async def refresh(self) -> None:
        """Copy what Redis knows. Raises RegistryUnavailable."""
        before = self._changes
        pools = [name.decode() for name in await self._command("SMEMBERS", _POOLS)]
        listing = self._redis.pipeline(transaction=False)
        for pool in pools:
            listing.smembers(_pool_key(pool))
        members = await self._run(listing) if pools else []
        ids = [(pool, id.decode()) for pool, found in zip(pools, members, strict=True) for id in found]
        raws = await self._command("MGET", *(worker_key(id) for _, id in ids)) if ids else []
        records: dict[str, WorkerRecord] = {}
        gone = self._redis.pipeline(transaction=False)
        for (pool, id), raw in zip(ids, raws, strict=True):
            record = self._read(raw)
            if record is None or record.pool != pool:
                gone.srem(_pool_key(pool), id)
            else:
                records[id] = record
        if len(gone):
            await self._run(gone)
        if self._changes == before:  # else what was read may be older than what this replica was just told
            self._adopt(records)

    async def _run(self, pipeline: redis.asyncio.client.Pipeline) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await pipeline.execute()
        except (redis.exceptions.RedisError, TimeoutError, OSError) as fault:
            raise RegistryUnavailable("Redis does not answer") from fault

    async def _command(self, *arguments: str) -> Any:
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.execute_command(*arguments)
        return (await self._run(pipeline))[0]

    def _adopt(self, records: dict[str, WorkerRecord]) -> None:
        if records.keys() != self._records.keys():
            _log.info("workers", alive=sorted(records))
        endpoints: dict[str, list[Endpoint]] = {}
        for record in sorted(records.values(), key=lambda record: record.worker_id):
            if not record.draining:
                endpoint = Endpoint(
                    record.worker_id,
                    record.pool,
                    record.base_url,
                    record.model,
                    record.context_length,
                    record.model_fingerprint,
                )
                endpoints.setdefault(record.pool, []).append(endpoint)
        self._records = records
        self._endpoints = endpoints

    @staticmethod
    def _read(raw: bytes | None) -> WorkerRecord | None:
        if raw is None:
            return None
        try:
            return _decoder.decode(raw)
        except msgspec.DecodeError:
            _log.warning("a worker record in Redis is unreadable and is ignored")
            return None

    async def _keep_fresh(self) -> None:
        failing = False
        while not self._closing.is_set():
            try:
                await self.refresh()
                failing = False
            except RegistryUnavailable as fault:
                if not failing:
                    _log.warning("the registry cannot be read", reason=str(fault.__cause__))
                failing = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s):
                    await self._closing.wait()
