"""Admission: takes from every limit of a tenant at once or from none, and sees that each request is settled once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import msgspec

from gateway.admission import keys
from gateway.admission.errors import Refused, Stale, rate_headers
from gateway.admission.keys import TenantKeys
from gateway.admission.leases import Leases
from gateway.admission.periods import from_ms, to_ms
from gateway.admission.plan import Counter, Plan, Plans
from gateway.admission.rebuild import LedgerSums, Rebuilding, tokens_of
from gateway.admission.redis import RedisUnavailable, create_redis
from gateway.admission.scripts import ADMIT, ANNOUNCE, SCRIPTS
from gateway.admission.settlements import Settlement, Settlements
from gateway.admission.snapshot import TenantCounters, snapshot
from gateway.admission.spool import Spool
from gateway.admission.ticket import MAX_AMOUNT, Bound, Draft, Hold, Ticket, encode
from gateway.billing.usage import UsageEvent
from gateway.clock import Clock
from gateway.tenants.principal import LONGEST_REQUEST_S, Principal

log = logging.getLogger(__name__)

_TENANT_LIFE_MS = 7 * 24 * 3600 * 1000
_ATTEMPTS = 5
_CLOSE_LIMIT_S = 2.0
_NOTHING_HELD = Hold(b"", b"", "")


class _Request(msgspec.Struct, frozen=True):
    """One that asks to be admitted."""

    id: UUID
    text: str
    """Of its id."""
    keys: TenantKeys
    principal: Principal
    draft: Draft
    bound: Bound


class Admission:
    """One per gateway process. Limits are shared with every other process through Redis alone.

    ``lease_s``: a request whose gateway is silent for so long is settled by the janitor. ``renewal_s``: interval of
    heartbeats, which renew leases and write checkpoints. ``timeout_s``: longest wait for one answer of Redis.
    ``ledger``: sums over the ledger's rows, asked when Redis lacks a counter. ``longest_s``: the longest that any
    request may run; leases are renewed a while beyond, and settled ids are remembered longer still.
    ``max_unsettled``: with so many settlements waiting for Redis, new requests are kept out. ``spool_dir``: folder for
    those that fail, so that they survive this process; None: they wait in memory alone.
    """

    def __init__(
        self,
        redis_url: str,
        clock: Clock,
        *,
        lease_s: float,
        renewal_s: float,
        timeout_s: float,
        ledger: LedgerSums,
        longest_s: float = LONGEST_REQUEST_S,
        max_unsettled: int = 10_000,
        spool_dir: Path | None = None,
    ) -> None:
        self._clock = clock
        self._lease_ms = round(lease_s * 1000)
        self._renewal_s = renewal_s
        self._tombstone_ms = round(3 * longest_s * 1000)
        self._redis = create_redis(
            redis_url,
            timeout_s=timeout_s,
            scripts=SCRIPTS,
            on_connected=self._connected,
            name="penstock-admission",
        )
        self._spool = Spool(spool_dir) if spool_dir is not None else None
        self._settlements = Settlements(self._redis, clock, limit=max_unsettled, spool=self._spool)
        self._leases = Leases(
            self._redis,
            self._settlements,
            lease_ms=self._lease_ms,
            tombstone_ms=self._tombstone_ms,
            longest_s=1.5 * longest_s,  # a slow reader may still be served when its backend has finished
            # Long enough for every gateway to notice an emptied shard by its heartbeat and to bring back what it holds.
            opening_ms=round((renewal_s + timeout_s) * 1000),
        )
        self._plans = Plans()
        self._rebuilding = Rebuilding(self._redis, ledger)
        self._beat = asyncio.Event()
        self._times_connected = 0
        self._sweep_from = 0.0
        self._ahead = timedelta(0)
        self._runner: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, open the shards of a Redis never used, and begin heartbeats. Redis may be away: it is awaited."""
        try:
            await self._leases.learn_epochs()
            await self._learn_time()
        except RedisUnavailable as fault:
            log.warning("Redis is away at start, requests are refused until it is back: %s", fault)
        self._runner = asyncio.get_running_loop().create_task(self._run(), name="admission")
        self._runner.add_done_callback(_report_end)

    async def close(self) -> None:
        """Wait, but not for long, until pending settlements have landed; then stop. Open requests expire by lease."""
        try:
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await self._settlements.drained()
        except TimeoutError:
            log.warning("%d settlements did not reach Redis", self._settlements.waiting)
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        await self._redis.close()
        await asyncio.sleep(0)  # settlements on their way have failed, and now go to the spool
        if self._spool is not None:
            await self._spool.close()
        if self._settlements.unsafe:
            log.error("%d settlements are lost; their requests will be settled as abandoned", self._settlements.unsafe)

    @property
    def open_requests(self) -> int:
        """Admitted here and not settled yet."""
        return self._leases.open

    @property
    def waiting_settlements(self) -> int:
        """Not yet taken by Redis."""
        return self._settlements.waiting

    def now(self) -> datetime:
        """The time in UTC as Redis has it, to within a few milliseconds: what ``admitted_at`` would be. This host's
        own clock, if Redis never answered."""
        return self._clock.now() + self._ahead

    # Admitting

    async def admit(
        self,
        request_id: UUID,
        principal: Principal,
        *,
        draft: Draft,
        bound: Bound,
        after: Stale | None = None,
    ) -> Ticket:
        """Take from all limits that bear on it at once. ``bound``: the most that the request can come to; it is
        reserved. ``after``: why the principal was loaded anew since. Is it older than that all the same, Postgres was
        restored from a backup, and its generation counts from here on.

        Raises Refused (nothing was used up), Stale (load the principal anew), RedisUnavailable, and whatever the
        ledger raises when a counter is built from it. A tenant that fails open is served unreserved instead of
        RedisUnavailable; its request is counted when Redis is back.
        """
        if not (0 <= bound.nano_usd <= MAX_AMOUNT and 0 <= bound.tokens <= MAX_AMOUNT):
            raise ValueError(f"the bound of a request lies between 0 and {MAX_AMOUNT}, not at {bound}")
        if self._settlements.full:
            raise RedisUnavailable("too many settlements wait for Redis")
        spelled = keys.of_tenant(principal.tenant_id)
        request = _Request(request_id, str(request_id), spelled, principal, draft, bound)
        try:
            return await self._admit(request, after)
        except RedisUnavailable as fault:
            if principal.redis_loss != "fail_open":
                raise
            log.warning("request %s is served unreserved: %s", request_id, fault)
            now = self.now()
            plan = self._plans.plan(principal, draft.route, draft.end_user, now)
            return self._ticket(request, plan, now, {}, tight=False)

    async def _admit(self, request: _Request, after: Stale | None) -> Ticket:
        now, principal, draft = self.now(), request.principal, request.draft
        for _ in range(_ATTEMPTS):
            plan = self._plans.plan(principal, draft.route, draft.end_user, now)
            reply = await self._ask(request, plan, after)
            answer = reply[0]
            if answer == b"ADMITTED":
                _, ms, tight, *rates = reply
                return self._ticket(request, plan, from_ms(ms), rate_headers(*rates), tight=bool(tight))
            if answer == b"REFUSED":
                raise _refused(plan, reply)
            if answer == b"STALE":
                raise Stale(reply[1])
            if answer == b"OPENING":
                raise RedisUnavailable("Redis lost its data and is being restored", retry_after_s=reply[1] / 1000)
            if answer == b"STALE_PERIOD":
                now = from_ms(reply[1])
            elif answer == b"EMPTY":
                await self._leases.reopen(principal.shard)
            elif answer == b"REBUILD":
                await self._rebuild(principal, draft, plan, reply[1:])
            else:
                raise RuntimeError(f"admission of {request.text}: {answer.decode()}; request ids must be new")
        raise RedisUnavailable("a limit could not be restored, since its requests keep ending; try again")

    async def _ask(self, request: _Request, plan: Plan, after: Stale | None) -> list[Any]:
        spelled, principal, draft, bound = request.keys, request.principal, request.draft, request.bound
        before, behind = plan.blank.around(request.text, principal, draft)
        asked = self._redis.run(
            ADMIT,
            (
                spelled.epoch,
                spelled.tenant,
                spelled.live,
                spelled.request(request.text),
                spelled.leases,
                spelled.refusals,
            ),
            (
                self._redis.time_offset_ms,
                self._lease_ms,
                request.text,
                spelled.id,
                principal.key_id,
                principal.generation,
                bound.nano_usd,
                bound.tokens,
                draft.end_user or "",
                plan.packed,
                plan.counters,
                plan.who,
                before,
                behind,
                _TENANT_LIFE_MS,
                "" if after is None else after.generation,
            ),
        )
        try:
            return cast("list[Any]", await asked)
        except RedisUnavailable as fault:
            if not fault.unsent and principal.redis_loss != "fail_open":
                # Redis may have admitted it, or may yet do so when it wakes. Served all the same, it will be settled.
                self._withdraw(request.id, principal)
            raise
        except asyncio.CancelledError:
            self._withdraw(request.id, principal)
            raise

    def _ticket(
        self, request: _Request, plan: Plan, admitted_at: datetime, headers: dict[str, str], *, tight: bool
    ) -> Ticket:
        draft = request.draft
        ticket = Ticket(
            request_id=request.id,
            id_text=request.text,
            keys=request.keys,
            principal=request.principal,
            draft=draft,
            admitted_at=admitted_at,
            bound=request.bound,
            hold=Hold(plan.counters, plan.who, draft.end_user or ""),
            headers=headers,
            tight=tight,
            clock=self._clock,
            submit=self._settle,
        )
        self._leases.add(ticket)
        return ticket

    async def _rebuild(self, principal: Principal, draft: Draft, plan: Plan, missing: list[int]) -> None:
        now = await self._redis_time()
        work = []
        for number in missing:
            limit, tenant_id = plan.limits[number], principal.tenant_id
            if limit.metric == "concurrent":
                work.append(self._rebuilding.recount(tenant_id, limit))
            else:
                counter = Counter.of(limit)
                if counter.each:
                    counter = replace(counter, target=draft.end_user or "")
                work.append(self._rebuilding.build(tenant_id, counter, limit, plan.periods[number], now))
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            if outcome is not None:
                raise outcome

    async def announce_generation(self, tenant_id: UUID, generation: int) -> None:
        """From now on principals of an older generation are Stale, on every gateway. Raises RedisUnavailable."""
        key = keys.of_tenant(tenant_id).tenant
        await self._redis.run(ANNOUNCE, (key,), (generation, _TENANT_LIFE_MS))

    # Settling

    def _settle(self, ticket: Ticket, event: UsageEvent, refund: bool) -> Settlement:
        self._leases.remove(ticket.request_id)
        return self._submit(ticket.request_id, ticket.id_text, ticket.keys, event, ticket.hold, refund)

    def _withdraw(self, request_id: UUID, principal: Principal) -> None:
        spelled = keys.of_tenant(principal.tenant_id)
        self._submit(request_id, str(request_id), spelled, None, _NOTHING_HELD, True)

    def _submit(
        self, request_id: UUID, id_text: str, spelled: TenantKeys, event: UsageEvent | None, hold: Hold, refund: bool
    ) -> Settlement:
        settlement = Settlement(
            self._redis,
            request_id,
            spelled.shard,
            (
                spelled.tenant,
                spelled.live,
                spelled.request(id_text),
                spelled.leases,
                spelled.usage,
                spelled.alerts,
                spelled.epoch,
            ),
            (
                self._redis.time_offset_ms,
                id_text,
                spelled.id,
                to_ms(event.admitted_at) if event else 0,
                event.charged_nano_usd if event else 0,
                tokens_of(event) if event else 0,
                encode(event) if event else b"",
                int(refund),
                self._tombstone_ms,
                hold.counters,
                hold.end_user,
            ),
        )
        self._settlements.submit(settlement)
        return settlement

    async def expire_leases(self) -> int:
        """The janitor's sweep over all shards: settles requests whose gateway fell silent. Returns how many."""
        return await self._leases.expire()

    async def counters(self, tenant_id: UUID) -> TenantCounters:
        """All that Redis counts for a tenant now. Raises RedisUnavailable."""
        return await snapshot(self._redis, tenant_id)

    # Keeping leases, and bringing back what Redis lost

    async def _redis_time(self) -> datetime:
        seconds, micros = await self._redis.command("TIME")
        return from_ms(int(seconds) * 1000 + int(micros) // 1000 + self._redis.time_offset_ms)

    async def _learn_time(self) -> None:
        self._ahead = await self._redis_time() - self._clock.now()

    async def _heartbeat(self) -> None:
        await self._leases.renew()
        await self._learn_time()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._settlements.run())
            tasks.create_task(self._repeat(self._heartbeat, self._renewal_s, self._beat))
            tasks.create_task(self._repeat(self._sweep, self._renewal_s / 2, asyncio.Event()))

    async def _repeat(self, work: Callable[[], Awaitable[object]], interval_s: float, early: asyncio.Event) -> None:
        while True:
            # Not wait_for: on Python 3.11 it may swallow a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await early.wait()
            early.clear()
            try:
                await work()
            except RedisUnavailable as fault:
                log.warning("%s: %s", work.__name__.strip("_"), fault)
            except Exception:
                # Whatever it is, leases must go on being kept.
                log.exception("%s failed; it goes on", work.__name__.strip("_"))

    def _connected(self) -> None:
        self._times_connected += 1
        self._beat.set()
        if self._times_connected > 1:
            # Redis may have restarted without its last second. Others reconnect too: let them renew before sweeping.
            self._sweep_from = self._clock.monotonic() + 2 * self._renewal_s
            self._settlements.resend()
        self._settlements.retry_now()

    async def _sweep(self) -> None:
        if self._clock.monotonic() >= self._sweep_from:
            await self.expire_leases()


def _refused(plan: Plan, reply: list[Any]) -> Refused:
    _, _, number, retry_ms, remaining, *rates = reply
    limit = plan.limits[number]
    return Refused(
        limit.metric,
        subject=limit.subject,
        window=limit.window,
        limit=limit.amount,
        remaining=remaining,
        retry_after_s=None if retry_ms < 0 else retry_ms / 1000,
        headers=rate_headers(*rates),
    )


def _report_end(runner: asyncio.Task[None]) -> None:
    if not runner.cancelled() and (fault := runner.exception()) is not None:
        log.critical("admission stopped keeping leases", exc_info=fault)
