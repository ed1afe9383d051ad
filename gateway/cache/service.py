"""The answer cache as the pipeline has it: asked before the model, told afterwards what the model said."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random
from types import TracebackType
from typing import Final
from uuid import UUID

import structlog

from gateway.admission.redis import RedisError, RedisUnavailable, create_redis
from gateway.cache.agreement import Agreement, Agreements
from gateway.cache.entry import Entry, Opener
from gateway.cache.faults import told
from gateway.cache.flights import Flights
from gateway.cache.found import Hit, Miss, Outcome, hit
from gateway.cache.index import SemanticIndex
from gateway.cache.keeping import LAST_S, Describe, Keeper
from gateway.cache.lookup import LookUp, Room
from gateway.cache.parts import Counter, DataKeys, Embedder, Guards
from gateway.cache.pause import Pause, Paused
from gateway.cache.purging import Purger
from gateway.cache.question import Question, read_question
from gateway.cache.store import SCRIPTS, Store
from gateway.cache.vectors import Vectors
from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable
from gateway.long_work import worked
from gateway.secret_key import SecretKey
from gateway.telemetry import Sampler

LIMIT_S: Final = 0.05
"""For all of a look-up."""
_TIMEOUT_S: Final = 1.0
"""After which a connection to Redis is given up."""
_RECHECK_S: Final = 10.0
"""How often the index is made, or asked for where it cannot be made."""
_MOST_REMOVALS: Final = 100
_log = structlog.get_logger(__name__)


class AnswerCache:
    """One per gateway process. Use as an async context manager around the time in which requests are served.

    ``url``: of one Redis server. ``embedder``: None for the exact tier alone. ``limit_s``: for all of a look-up.
    """

    def __init__(
        self,
        url: str,
        secret_key: SecretKey,
        keys: DataKeys,
        guards: Guards,
        describe: Describe,
        *,
        embedder: Embedder | None,
        clock: Clock,
        counter: Counter,
        random: Random | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        # Writes have a connection of their own: what is asked on one comes in order, and answers may be long.
        self._reads = create_redis(url, timeout_s=_TIMEOUT_S, name="penstock-answers")
        self._writes = create_redis(url, timeout_s=_TIMEOUT_S, scripts=SCRIPTS, name="penstock-answers-writes")
        self.store = Store(self._writes)
        self._secret_key = secret_key
        self._clock = clock
        self._counter = counter
        self._limit_s = limit_s
        self._agreements = Agreements(self._writes)
        self._index = None
        vectors = None
        if embedder is not None:
            self._index = SemanticIndex(self._reads, url, embedder.name, embedder.dimensions)
            vectors = Vectors(embedder, keys)
        redis_pause = Pause(clock)
        self._room = Room(
            store=Store(self._reads),
            opener=Opener(keys),
            secret_key=secret_key,
            guards=guards,
            index=self._index,
            vectors=vectors,
            pauses={"redis": redis_pause, "keys": Pause(clock), "embedder": Pause(clock)},
            clock=clock,
            counter=counter,
            random=random or Random(),
            spoiled=self._remove_spoiled,
            index_missing=self._make_index_soon,
        )
        self._keeper = Keeper(
            self.store,
            self._agreements,
            keys,
            secret_key,
            guards,
            index=self._index,
            vectors=vectors,
            describe=describe,
            clock=clock,
            counter=counter,
            redis_pause=redis_pause,
        )
        self._purger = Purger(url, self.store, secret_key)
        self._flights = Flights(clock)
        self._told = Sampler(clock)
        self._tasks = asyncio.TaskGroup()
        self._keeping: asyncio.Task[None] | None = None
        self._indexing: asyncio.Task[None] | None = None
        self._next_indexing = float("-inf")
        self._removals: set[asyncio.Task[None]] = set()

    @property
    def semantic_available(self) -> bool | None:
        """None: not known yet."""
        return False if self._index is None else self._index.available

    @property
    def semantic_fault(self) -> str | None:
        """Why it is not available, in Redis' words."""
        return "no embedder is configured" if self._index is None else self._index.fault

    async def fault(self) -> str | None:
        """Why it does not answer, or keeps nothing; None: nothing is known against it."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._writes.command("PING")
        except (RedisUnavailable, RedisError, TimeoutError) as fault:
            return f"unavailable: {told(fault)}"
        return None if self._keeper.fault is None else f"keeps nothing: {self._keeper.fault}"

    async def __aenter__(self) -> AnswerCache:
        await self._tasks.__aenter__()
        self._keeping = self._tasks.create_task(self._keeper.run(), name="keep answers")
        self._make_index_soon()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._keeper.drained(LAST_S)
        for task in (self._keeping, self._indexing, *self._removals):
            if task is not None:
                task.cancel()
        await self._tasks.__aexit__(None, None, None)
        await self._reads.close()
        await self._writes.close()

    async def look_up(self, question: Question) -> Hit | Miss:
        """What was kept for it, or a miss. Takes at most the limit, and raises nothing."""
        search: LookUp | None = None
        found: Hit | Outcome = "unavailable"
        try:
            async with asyncio.timeout(self._limit_s):
                asked = await worked(question.size, partial(read_question, question, self._secret_key))
                if isinstance(asked, str):
                    self._counter.count("bypassed", {"reason": asked})
                    return Miss("bypass", reason=asked)
                search = LookUp(self._room, question, asked)
                found = await search.run()
        except Paused:
            pass
        except Exception as fault:
            self._tell_fault("question" if search is None else search.part, fault)
        if isinstance(found, Hit):
            self._counter.count("lookups", {"outcome": "hit", "tier": found.tier})
            return found
        tier = "semantic" if search is not None and search.draft.meaning is not None else "exact"
        self._counter.count("lookups", {"outcome": found, "tier": tier})
        return Miss(found) if search is None else self._miss(question, search, found)

    async def purge(
        self, tenant_id: UUID, *, route: str | None = None, version: str | None = None, tag: str | None = None
    ) -> int:
        """Forget the tenant's answers that have all that is given; all of them, if nothing is. How many there were.
        Raises RedisUnavailable."""
        return await self._purger.purge(tenant_id, route=route, version=version, tag=tag)

    async def erase(self, tenant_id: UUID, *, end_user: str | None = None, request_id: str | None = None) -> int:
        """Forget what an end user, or one request, brought in; all that there is of the tenant, if neither is given.
        How many answers there were. Raises RedisUnavailable."""
        gone = await self._purger.purge(tenant_id, end_user=end_user, request_id=request_id)
        if end_user is None and request_id is None:
            await self._purger.erase_counts(tenant_id)
        return gone

    async def agreement(self, tenant_id: UUID, *, days: int = 30) -> Agreement:
        """How often the model agreed with what the semantic tier would have answered. Raises RedisUnavailable."""
        return await self._agreements.sum(tenant_id, self._clock.now(), days)

    async def drained(self, limit_s: float | None = None) -> bool:
        """Waits until all that was told of is kept, or known not to be."""
        return await self._keeper.drained(limit_s)

    def _miss(self, question: Question, search: LookUp, outcome: Outcome) -> Miss:
        keep, candidate = partial(self._keeper.offer, search.draft), search.draft.compare
        if not question.rules.single_flight or outcome not in ("miss", "unavailable"):
            return Miss(outcome, keep=keep, candidate=candidate)
        flight, leads = self._flights.join(search.draft.exact)
        taken = partial(self._taken, question)
        return Miss(outcome, keep=keep, flight=flight, leads=leads, taken=taken)

    def _taken(self, question: Question, entry: Entry | None) -> Hit | None:
        good = entry is not None and entry.good_for(question, self._clock.now())
        self._counter.count("followed", {"outcome": "served" if good else "freed"})
        return hit(entry, "exact") if entry is not None and good else None

    def _remove_spoiled(self, question: Question, exact: str) -> None:
        self._counter.count("faults", {"part": "unreadable"})
        if len(self._removals) < _MOST_REMOVALS:
            task = self._tasks.create_task(self._remove(question.tenant_id, exact), name="remove an answer")
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _remove(self, tenant_id: UUID, exact: str) -> None:
        try:
            await self.store.remove(tenant_id, (exact,))
        except (RedisUnavailable, RedisError) as fault:
            self._tell_fault("removal", fault)

    def _make_index_soon(self) -> None:
        now = self._clock.monotonic()
        if self._index is None or (self._indexing is not None and not self._indexing.done()):
            return
        if self._index.available is False and now < self._next_indexing:
            return
        self._next_indexing = now + _RECHECK_S
        self._indexing = self._tasks.create_task(self._make_index(self._index), name="make the semantic index")

    async def _make_index(self, index: SemanticIndex) -> None:
        import redis

        try:
            await index.make()
        except (redis.RedisError, OSError) as fault:
            self._tell_fault("index", fault)

    def _tell_fault(self, part: str | None, fault: Exception) -> None:
        """``part``: that was waited for."""
        where: str = "keys" if isinstance(fault, DatabaseUnavailable) else part or "look-up"
        self._counter.count("faults", {"part": where})
        for name, pause in self._room.pauses.items():
            if name == where and not isinstance(fault, RedisError):
                pause.failed()
        if (count := self._told.take(where)) is not None:
            _log.warning("answer_cache_fault", part=where, error=told(fault), count=count)
