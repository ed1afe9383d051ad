"""Keeps answers behind the requests that made them: one task, a bounded queue, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from uuid import UUID

import msgspec
import structlog

from gateway.admission.redis import RedisUnavailable
from gateway.apis import Api
from gateway.cache.agreement import Agreements, agree
from gateway.cache.embedder import TooLong
from gateway.cache.entry import Entry, seal_entry, seal_text, utc
from gateway.cache.faults import told
from gateway.cache.found import Answer, Hit
from gateway.cache.index import SemanticIndex
from gateway.cache.keepable import why_not_kept
from gateway.cache.parts import Counter, DataKey, DataKeys, Facts, Guards
from gateway.cache.pause import Pause, Paused
from gateway.cache.question import Meaning, Question, speaks_of_now
from gateway.cache.store import BODY, END_USER, ORIGIN, PARTITION, ROUTE, TAGS, TENANT, TEXT, VERSION, Put, Store
from gateway.cache.vectors import Vectors
from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable
from gateway.long_work import worked
from gateway.secret_key import SecretKey
from gateway.telemetry import Sampler

MOST_WAITING: Final = 1000
MOST_WAITING_BYTES: Final = 64 * 1024 * 1024
EMBED_LIMIT_S: Final = 5.0
LAST_S: Final = 2.0
"""At the end, for what still waits."""
_log = structlog.get_logger(__name__)

Describe = Callable[[Api, bytes], Facts]


class Draft(msgspec.Struct, kw_only=True):
    """What a miss leaves behind for its answer to be kept by."""

    question: Question
    exact: str
    """Name of the entry."""
    meaning: Meaning | None = None
    mark: asyncio.Future[bytes | None] | None = None
    """Of the tenant's last purge. None: Redis did not answer so far as to be asked for it."""
    vector: bytes | None = None
    """Of the meaning's text, if it came in time."""
    compare: Hit | None = None
    """What the semantic tier had."""


class _Job(msgspec.Struct, frozen=True):
    draft: Draft
    mark: asyncio.Future[bytes | None]
    entry: Entry
    answer: Answer
    size: int
    """Bytes of question and answer, which stay while it waits."""


class Keeper:
    """``index`` and ``vectors``: None without a semantic tier."""

    def __init__(
        self,
        store: Store,
        agreements: Agreements,
        keys: DataKeys,
        secret_key: SecretKey,
        guards: Guards,
        *,
        index: SemanticIndex | None,
        vectors: Vectors | None,
        describe: Describe,
        clock: Clock,
        counter: Counter,
        redis_pause: Pause,
    ) -> None:
        self._store = store
        self._agreements = agreements
        self._keys = keys
        self._secret_key = secret_key
        self._guards = guards
        self._index = index
        self._vectors = vectors
        self._describe = describe
        self._clock = clock
        self._counter = counter
        self._pause = redis_pause
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue(MOST_WAITING)
        self._bytes = 0
        self._told = Sampler(clock)
        self.fault: str | None = None
        """Why the latest answer could not be kept, in Redis' words or the database's."""

    def offer(self, draft: Draft, answer: Answer) -> Entry | None:
        """What may be given to those who wait for it, and is going to be kept if Redis takes it; or None."""
        question, meaning = draft.question, draft.meaning
        if (reason := why_not_kept(question.rules, answer.facts, len(answer.body))) is not None:
            self._count(reason)
            return None
        entry = Entry(
            exact=draft.exact,
            partition=None if meaning is None else meaning.partition,
            tenant_id=question.tenant_id,
            project_id=question.project_id,
            end_user=question.end_user,
            route=question.route,
            version=question.version,
            made_at=utc(self._clock.now()),
            ttl_s=question.rules.ttl_s,
            request_id=answer.request_id,
            tool_calls=answer.facts.has_tool_calls,
            usage=answer.usage,
            body=answer.body,
            text="" if meaning is None else meaning.text,
        )
        if draft.mark is None:
            self._count("unavailable")
        elif self._jobs.full() or self._bytes + (size := len(answer.body) + question.size) > MOST_WAITING_BYTES:
            self._count("queue_full")
        else:
            self._bytes += size
            self._jobs.put_nowait(_Job(draft, draft.mark, entry, answer, size))
        return entry

    async def run(self) -> None:
        while True:
            job = await self._jobs.get()
            try:
                await self._keep(job)
            except Paused:
                self._count("unavailable")
            except (RedisUnavailable, DatabaseUnavailable) as fault:
                self._count("unavailable")
                self._tell(fault)
            except Exception as fault:
                self._count("fault")
                self._tell(fault)
            finally:
                self._bytes -= job.size
                self._jobs.task_done()

    async def drained(self, limit_s: float | None = None) -> bool:
        """Whether all that was offered is kept, or known not to be, within the limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._jobs.join()
        except TimeoutError:
            return False
        return True

    async def _keep(self, job: _Job) -> None:
        self._pause.check()
        of_now = await asyncio.to_thread(speaks_of_now, job.draft.question, self._guards)
        if of_now and not job.draft.question.rules.time_words:
            self._count("time_words")
            return
        entry = msgspec.structs.replace(job.entry, of_now=of_now)
        put = await self._put_of(job, entry, await job.mark or b"")
        try:
            kept, evicted = await self._store.put(put)
        except RedisUnavailable as fault:
            if not fault.unsent:  # else it answers, though it takes nothing, as when it is full
                self._pause.failed()
            raise
        self._pause.went_well()
        self.fault = None
        self._count(kept.lower())
        if evicted:
            self._counter.count("evicted", {}, evicted)
        if job.draft.compare is not None:
            try:
                await self._compare(job, job.draft.compare)
            except Exception as fault:
                self._counter.count("faults", {"part": "comparison"})
                _log.warning("semantic_match_not_compared", error=told(fault))

    async def _put_of(self, job: _Job, entry: Entry, mark: bytes) -> Put:
        question = job.draft.question
        key = await self._keys.key(entry.tenant_id, entry.end_user)
        sealed = await worked(len(entry.body), lambda: seal_entry(entry, key))
        fields: dict[str, str | bytes] = {
            BODY: sealed,
            ROUTE: purge_name(self._secret_key, entry.tenant_id, "route", entry.route),
            VERSION: purge_name(self._secret_key, entry.tenant_id, "version", entry.version),
            ORIGIN: entry.request_id,
        }
        if question.tags:
            names = (purge_name(self._secret_key, entry.tenant_id, "tag", tag) for tag in question.tags)
            fields[TAGS] = " ".join(names)
        if entry.end_user is not None:
            fields[END_USER] = entry.end_user
        searched = await self._searched_by(job, key)
        indexed = 0 if self._index is None or not searched else self._index.entry_bytes
        rules = question.rules
        return Put(entry.tenant_id, entry.exact, mark, rules.ttl_s, rules.max_tenant_bytes, fields | searched, indexed)

    async def _searched_by(self, job: _Job, key: DataKey) -> dict[str, str | bytes]:
        """The fields that it is found by its meaning by; none where that cannot be."""
        entry, index = job.entry, self._index
        if entry.partition is None or index is None or index.available is False:
            return {}
        vector = await self._vector(job)
        if vector is None:
            return {}
        return {
            TENANT: entry.tenant_id.hex,
            PARTITION: entry.partition,
            TEXT: seal_text(entry.text, entry.tenant_id, entry.exact, key),
            index.field: vector,
        }

    async def _vector(self, job: _Job) -> bytes | None:
        """None: it is found by its exact name alone."""
        if job.draft.vector is not None or self._vectors is None:
            return job.draft.vector
        try:
            async with asyncio.timeout(EMBED_LIMIT_S):
                return await self._vectors.vector(job.entry.tenant_id, job.entry.text)
        except DatabaseUnavailable:
            raise
        except TooLong:
            return None
        except Exception as fault:
            self._counter.count("faults", {"part": "embedder"})
            _log.warning("answer_not_embedded", error=told(fault))
            return None

    async def _compare(self, job: _Job, had: Hit) -> None:
        old, new = self._describe(job.draft.question.api, had.body).text, job.answer.facts.text
        if self._vectors is None or not (old and new):
            return
        async with asyncio.timeout(EMBED_LIMIT_S):
            agreed = await agree(old, new, self._vectors.embedder)
        self._counter.count("agreement", {"agreed": "yes" if agreed else "no"})
        _log.info(
            "semantic_match_compared",
            agreed=agreed,
            similarity=None if had.similarity is None else round(had.similarity, 4),
            tenant=str(job.entry.tenant_id),
            request_id=job.answer.request_id,
            origin=had.origin,
        )
        await self._agreements.count(job.entry.tenant_id, agreed, self._clock.now())

    def _tell(self, fault: Exception) -> None:
        self.fault = told(fault)
        if (count := self._told.take(type(fault).__name__)) is not None:
            _log.warning("answers_not_kept", error=self.fault, count=count)

    def _count(self, outcome: str) -> None:
        self._counter.count("kept", {"outcome": outcome})


def purge_name(secret_key: SecretKey, tenant_id: UUID, kind: str, value: str) -> str:
    """What stands for a route, a version or a tag of an entry."""
    return secret_key.keyed_hash(f"answer cache {kind}", tenant_id.bytes, value.encode())[:32]
