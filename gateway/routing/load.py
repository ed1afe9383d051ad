"""What the replicas tell one another: how many requests each has at which endpoint, and which endpoints it leaves out.

Redis keys: ``{fleet}:load:<replica>`` holds what one replica told, with a time to live, so that the counts of a dead
one vanish; ``{fleet}:replicas`` the replicas' ids. The set only says where to look. Telling and reading is one round
trip: a replica reads those that it found in the set a turn before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Annotated, Any

import msgspec
import redis.asyncio
import redis.exceptions
import structlog

from gateway.ids import uuid7
from gateway.redis_url import asyncio_client
from gateway.routing.policy import Balancer

EVERY_S = 0.25
TTL_S = 1.5
"""What a replica told holds for so long; also how long this one believes what it read last."""
_REPLICAS = "{fleet}:replicas"

_log = structlog.get_logger(__name__)


class Told(msgspec.Struct, array_like=True, frozen=True):
    """What one replica tells."""

    in_flight: dict[str, Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]]
    """Its requests, by endpoint."""
    votes: list[str]
    """Endpoints that it leaves out."""


_decoder = msgspec.msgpack.Decoder(Told)


def _load_key(replica: str) -> str:
    return f"{{fleet}}:load:{replica}"


class LoadExchange:
    """Keeps a ``Balancer`` told of the other replicas. An async context manager: it exchanges meanwhile.

    While Redis is away the balancer goes by its own figures.
    """

    def __init__(
        self,
        redis_url: str,
        balancer: Balancer,
        *,
        timeout_s: float,
        every_s: float = EVERY_S,
        ttl_s: float = TTL_S,
    ) -> None:
        self.replica = uuid7().hex
        self._balancer = balancer
        self._timeout_s = timeout_s
        self._every_s = every_s
        self._ttl_s = ttl_s
        self._redis = asyncio_client(redis_url, timeout_s=timeout_s, max_connections=1)
        self._others: list[str] = []
        self._silent: set[str] = set()
        self._read_at: float | None = None
        self._tasks = asyncio.TaskGroup()
        self._closing = asyncio.Event()

    async def __aenter__(self) -> LoadExchange:
        await self._tasks.__aenter__()
        self._tasks.create_task(self._keep_exchanging(), name="load-exchange")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Asked to end, not cancelled: within the Redis client a cancellation can get lost.
        self._closing.set()
        await self._tasks.__aexit__(None, None, None)
        await self._redis.aclose()

    async def exchange(self) -> None:
        """Tell, and read what the others told. Raises RedisError, TimeoutError or OSError."""
        others = self._others
        told = Told(self._balancer.in_flight(), self._balancer.votes())
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(_load_key(self.replica), msgspec.msgpack.encode(told), px=round(self._ttl_s * 1000))
        pipeline.sadd(_REPLICAS, self.replica)
        if self._silent:
            # One that lives after all puts itself back with its next turn.
            pipeline.srem(_REPLICAS, *self._silent)
        pipeline.smembers(_REPLICAS)
        if others:
            pipeline.execute_command("MGET", *map(_load_key, others))
        answers = await self._run(pipeline)
        raws: list[bytes | None] = answers.pop() if others else []
        members = {id.decode(errors="replace") for id in answers.pop()}
        self._silent = {id for id, raw in zip(others, raws, strict=True) if raw is None}
        self._others = sorted(members - {self.replica})
        self._adopt(raws)

    def _adopt(self, raws: Sequence[bytes | None]) -> None:
        in_flight: Counter[str] = Counter()
        votes: Counter[str] = Counter()
        replicas = 1
        for raw in raws:
            if raw is None:
                continue
            replicas += 1
            try:
                told = _decoder.decode(raw)
            except msgspec.DecodeError:  # a replica of another release: it lives, and that is all one can tell
                continue
            in_flight.update(told.in_flight)
            votes.update(set(told.votes))
        self._balancer.adopt(in_flight, votes, replicas=replicas)
        self._read_at = asyncio.get_running_loop().time()

    async def _run(self, pipeline: redis.asyncio.client.Pipeline) -> list[Any]:
        async with asyncio.timeout(self._timeout_s):
            return list(await pipeline.execute())

    async def _keep_exchanging(self) -> None:
        failing = False
        while not self._closing.is_set():
            try:
                await self.exchange()
                failing = False
            except (redis.exceptions.RedisError, TimeoutError, OSError) as fault:
                if not failing:
                    _log.warning("other replicas' load cannot be read", reason=str(fault))
                failing = True
                self._forget_what_is_old()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._closing.wait()
        await self._leave()

    def _forget_what_is_old(self) -> None:
        if self._read_at is not None and asyncio.get_running_loop().time() - self._read_at > self._ttl_s:
            self._balancer.adopt({}, {}, replicas=1)
            self._read_at = None

    async def _leave(self) -> None:
        """So that the others need not wait for this one's time to run out."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.delete(_load_key(self.replica))
        pipeline.srem(_REPLICAS, self.replica)
        with contextlib.suppress(redis.exceptions.RedisError, TimeoutError, OSError):
            await self._run(pipeline)
