"""Admission: takes from every limit of a tenant at once or from none, and sees that each request is settled once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast
from uuid import UUID

from gateway.admission import keys
from gateway.admission.errors import Refused, Stale, rate_headers
from gateway.admission.leases import SCRIPTS as LEASE_SCRIPTS
from gateway.admission.leases import Leases
from gateway.admission.periods import EPOCH, Period, from_ms, period_at, to_ms
from gateway.admission.rebuild import REBUILD, SpentInLedger, rebuild_budget
from gateway.admission.redis import Argument, PipelinedRedis, RedisUnavailable, load_script
from gateway.admission.settlements import SETTLE, Settlement, Settlements
from gateway.admission.ticket import MAX_AMOUNT, Bound, Draft, Ticket, encode, encode_around
from gateway.billing.usage import UsageEvent
from gateway.clock import Clock
from gateway.tenants.principal import LONGEST_REQUEST_S, Budget, Metric, Principal, RateWindow

log = logging.getLogger(__name__)

ADMIT = load_script("admit")
ANNOUNCE = load_script("announce")

_METRICS: dict[bytes, tuple[Metric, RateWindow | None]] = {
    b"requests_per_minute": ("requests", "minute"),
    b"concurrent_requests": ("concurrent", None),
    b"budget": ("budget", None),
}
_TENANT_LIFE_MS = 7 * 24 * 3600 * 1000
_ATTEMPTS = 5
_CLOSE_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Counters:
    """What Redis counts for one tenant at this moment; amounts in nano-USD."""

    spent: int | None
    """In the running budget period; None while none has begun."""
    reserved: int | None
    live: int
    """Requests whose lease runs."""
    window: int
    """Requests in the window, as of the last admission."""


class Admission:
    """One per gateway process. Limits are shared with every other process through Redis alone.

    ``lease_s``: a request whose gateway is silent for so long is settled by the janitor. ``renewal_s``: interval of
    heartbeats, which renew leases and write checkpoints. ``timeout_s``: longest wait for one answer of Redis.
    ``spent``: what the ledger charged a tenant in a range of ``admitted_at``, leaving out some requests; asked when a
    budget's period begins in Redis. ``longest_s``: the longest that any request may run; leases are renewed a while
    beyond, and settled ids are remembered longer still. ``max_unsettled``: with so many settlements waiting for Redis,
    new requests are kept out.
    """

    def __init__(
        self,
        redis_url: str,
        clock: Clock,
        *,
        lease_s: float,
        renewal_s: float,
        timeout_s: float,
        spent: SpentInLedger,
        longest_s: float = LONGEST_REQUEST_S,
        max_unsettled: int = 10_000,
    ) -> None:
        self._clock = clock
        self._lease_ms = round(lease_s * 1000)
        self._renewal_s = renewal_s
        self._tombstone_ms = round(3 * longest_s * 1000)
        self._spent = spent
        self._redis = PipelinedRedis(
            redis_url,
            timeout_s=timeout_s,
            scripts=(ADMIT, SETTLE, REBUILD, ANNOUNCE, *LEASE_SCRIPTS),
            on_connected=self._connected,
            name="penstock-admission",
        )
        self._settlements = Settlements(self._redis, clock, limit=max_unsettled)
        self._leases = Leases(
            self._redis,
            self._settlements,
            lease_ms=self._lease_ms,
            tombstone_ms=self._tombstone_ms,
            longest_s=1.5 * longest_s,  # a slow reader may still be served when its backend has finished
            # Long enough for every gateway to notice an emptied shard by its heartbeat and to bring back what it holds.
            opening_ms=round((renewal_s + timeout_s) * 1000),
        )
        self._periods: dict[Budget, Period] = {}
        self._rebuilding: dict[UUID, asyncio.Future[None]] = {}
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
            log.error("%d settlements did not reach Redis; their requests will be settled as abandoned",
                      self._settlements.waiting)  # fmt: skip
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        await self._redis.close()

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
        """Take from all limits at once. ``bound``: the most that the request can come to; it is reserved.
        ``after``: why the principal was loaded anew since. Is it older than that all the same, Postgres was restored
        from a backup, and its generation counts from here on.

        Raises Refused (nothing was used up), Stale (load the principal anew), RedisUnavailable, and whatever
        ``spent`` raises when a budget's period begins and the ledger cannot be read.
        """
        if not (0 <= bound.nano_usd <= MAX_AMOUNT and 0 <= bound.tokens <= MAX_AMOUNT):
            raise ValueError(f"the bound of a request lies between 0 and {MAX_AMOUNT}, not at {bound}")
        if self._settlements.full:
            raise RedisUnavailable("too many settlements wait for Redis")
        now = self.now()
        for _ in range(_ATTEMPTS):
            budget = principal.limits.budget
            period = self._period(budget, now) if budget is not None else None
            reply = await self._ask(request_id, principal, bound, draft, period, after)
            answer = reply[0]
            if answer == b"ADMITTED":
                return self._ticket(request_id, principal, bound, draft, reply)
            if answer == b"REFUSED":
                raise self._refused(principal, reply)
            if answer == b"STALE":
                raise Stale(reply[1])
            if answer == b"OPENING":
                raise RedisUnavailable("Redis lost its data and is being restored", retry_after_s=reply[1] / 1000)
            if answer == b"STALE_PERIOD":
                now = from_ms(reply[1])
            elif answer == b"NEED_REBUILD" and reply[1] == b"epoch":
                await self._leases.reopen(principal.shard)
            elif answer == b"NEED_REBUILD" and period is not None:
                await self._rebuild(principal, period)
            else:
                raise RuntimeError(f"admission of {request_id}: {answer.decode()}; request ids must be new")
        raise RedisUnavailable("the budget could not be restored, since its requests keep ending; try again")

    async def _ask(
        self,
        request_id: UUID,
        principal: Principal,
        bound: Bound,
        draft: Draft,
        period: Period | None,
        after: Stale | None,
    ) -> list[Any]:
        spelled, limits, id_text = keys.of_tenant(principal.tenant_id), principal.limits, str(request_id)
        before, behind = encode_around(_blank(request_id, principal, draft))
        budget: tuple[Argument, ...] = ("", "", "", "")
        if limits.budget is not None and period is not None:
            budget = (limits.budget.amount, period.kind, to_ms(period.start), to_ms(period.end))
        asked = self._redis.run(
            ADMIT,
            (
                spelled.epoch,
                spelled.tenant,
                spelled.window,
                spelled.live,
                keys.request(spelled.shard, id_text),
                spelled.leases,
                spelled.refusals,
            ),
            (
                self._redis.time_offset_ms,
                self._lease_ms,
                id_text,
                spelled.id,
                principal.key_id,
                principal.generation,
                "" if limits.requests_per_minute is None else limits.requests_per_minute,
                "" if limits.max_concurrent is None else limits.max_concurrent,
                bound.nano_usd,
                *budget,
                before,
                behind,
                _TENANT_LIFE_MS,
                "" if after is None else after.generation,
            ),
        )
        try:
            return cast("list[Any]", await asked)
        except (RedisUnavailable, asyncio.CancelledError) as fault:
            if not (isinstance(fault, RedisUnavailable) and fault.unsent):
                # Redis may have admitted it, or may yet do so when it wakes.
                self._withdraw(request_id, principal)
            raise

    def _ticket(self, request_id: UUID, principal: Principal, bound: Bound, draft: Draft, reply: list[Any]) -> Ticket:
        _, now, _, period, remaining, reset_ms = reply
        ticket = Ticket(
            request_id=request_id,
            principal=principal,
            draft=draft,
            admitted_at=from_ms(now),
            bound=bound,
            period=period.decode(),
            headers=rate_headers(principal.limits.requests_per_minute, remaining, reset_ms),
            clock=self._clock,
            submit=self._settle,
        )
        self._leases.add(ticket)
        return ticket

    def _refused(self, principal: Principal, reply: list[Any]) -> Refused:
        _, _, reason, retry_ms, limit, remaining, requests, reset_ms = reply
        metric, window = _METRICS[reason]
        return Refused(
            metric,
            subject="tenant",
            window=window,
            retry_after_s=None if retry_ms < 0 else retry_ms / 1000,
            limit=limit,
            remaining=remaining,
            headers=rate_headers(principal.limits.requests_per_minute, requests, reset_ms),
        )

    def _period(self, budget: Budget, now: datetime) -> Period:
        period = self._periods.get(budget)
        if period is None or not period.holds(now):
            if len(self._periods) > 1000:
                self._periods.clear()
            period = self._periods[budget] = period_at(budget, now)
        return period

    async def announce_generation(self, tenant_id: UUID, generation: int) -> None:
        """From now on principals of an older generation are Stale, on every gateway. Raises RedisUnavailable."""
        key = keys.of_tenant(tenant_id).tenant
        await self._redis.run(ANNOUNCE, (key,), (generation, _TENANT_LIFE_MS))

    # Settling

    def _settle(self, ticket: Ticket, event: UsageEvent, refund: bool) -> asyncio.Future[None]:
        self._leases.remove(ticket.request_id)
        return self._submit(
            ticket.request_id, ticket.principal, ticket.period, event.charged_nano_usd, encode(event), refund
        )

    def _withdraw(self, request_id: UUID, principal: Principal) -> None:
        self._submit(request_id, principal, "", 0, b"", True)

    def _submit(
        self, request_id: UUID, principal: Principal, period: str, charged: int, event: bytes, refund: bool
    ) -> asyncio.Future[None]:
        spelled, id_text = keys.of_tenant(principal.tenant_id), str(request_id)
        settlement = Settlement(
            request_id,
            spelled.shard,
            (
                spelled.tenant,
                spelled.window,
                spelled.live,
                keys.request(spelled.shard, id_text),
                spelled.leases,
                spelled.usage,
            ),
            (id_text, period, charged, event, int(refund), self._tombstone_ms),
        )
        self._settlements.submit(settlement)
        return settlement.attempted

    async def expire_leases(self) -> int:
        """The janitor's sweep over all shards: settles requests whose gateway fell silent. Returns how many."""
        return await self._leases.expire()

    async def counters(self, tenant_id: UUID) -> Counters:
        """What Redis counts for a tenant now."""
        spelled = keys.of_tenant(tenant_id)
        now = to_ms(await self._redis_time())
        money, live, window = await asyncio.gather(
            self._redis.command("HMGET", spelled.tenant, "spent", "reserved"),
            self._redis.command("ZCOUNT", spelled.live, f"({now}", "+inf"),
            self._redis.command("HGET", spelled.window, "n"),
        )
        spent, reserved = (None if amount is None else int(amount) for amount in money)
        return Counters(spent, reserved, live, int(window or 0))

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

    async def _rebuild(self, principal: Principal, period: Period) -> None:
        """Begin the tenant's budget period in Redis; callers at the same time share one reading of the ledger."""
        running = self._rebuilding.get(principal.tenant_id)
        if running is not None:
            await asyncio.shield(running)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rebuilding[principal.tenant_id] = done
        try:
            await rebuild_budget(self._redis, principal.tenant_id, period, self._spent, tenant_life_ms=_TENANT_LIFE_MS)
        except Exception as fault:
            done.set_exception(fault)
            done.exception()  # it is raised here in any case; those who wait may be none
            raise
        finally:
            del self._rebuilding[principal.tenant_id]
            if not done.done():  # done, or cancelled: those who wait ask Redis again, and see
                done.set_result(None)


def _blank(request_id: UUID, principal: Principal, draft: Draft) -> UsageEvent:
    return UsageEvent(
        request_id=request_id,
        admitted_at=EPOCH,
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        route=draft.route,
        status="abandoned",
        prompt_tokens=0,
        completion_tokens=0,
        charged_nano_usd=0,
        cost_nano_usd=0,
        price_id=draft.price.id if draft.price else None,
        streamed=draft.streamed,
        client_request_id=draft.client_request_id,
        project_id=principal.project_id,
    )


def _report_end(runner: asyncio.Task[None]) -> None:
    if not runner.cancelled() and (fault := runner.exception()) is not None:
        log.critical("admission stopped keeping leases", exc_info=fault)
