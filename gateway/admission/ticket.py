"""What an admitted request holds: its reservation, its meter so far, and the right to be settled once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Literal
from uuid import UUID

import msgspec
from msgspec.structs import replace

from gateway.admission.keys import TenantKeys
from gateway.admission.settlements import Settlement
from gateway.apis import Api
from gateway.billing.prices import Tariff
from gateway.billing.tariff import rounded
from gateway.billing.usage import Status, TokenUsage, UsageEvent
from gateway.clock import Clock
from gateway.tenants.principal import Principal

log = logging.getLogger(__name__)

MAX_AMOUNT = 2**53 - 1
"""Largest amount in nano-USD that Redis' Lua counts exactly; about nine million dollars."""
MAX_TOKENS = 10**12
_MOST = {
    "prompt_tokens": MAX_TOKENS,
    "completion_tokens": MAX_TOKENS,
    "cached_tokens": MAX_TOKENS,
    "cache_write_tokens": MAX_TOKENS,
    "reasoning_tokens": MAX_TOKENS,
    "images": MAX_TOKENS,
    "compute_us": MAX_AMOUNT,
}
UNPRICED = Tariff(None, None)
_encoder = msgspec.json.Encoder()
_NO_USAGE = TokenUsage()
_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class Draft(msgspec.Struct, frozen=True):
    """What is known of a request's ledger row before it runs."""

    route: str
    tariff: Tariff
    """The prices in force."""
    streamed: bool = False
    client_request_id: str | None = None
    end_user: str | None = None
    """Keyed hash of the end user that the request names."""
    tags: tuple[str, ...] = ()
    api: Api = "chat_completions"


class Bound(msgspec.Struct, frozen=True):
    """The most that a request can come to. It is reserved at admission."""

    nano_usd: int
    tokens: int
    """Of the prompt, and of as much output as may be asked for, over all choices."""


def charge(status: Status, usage: TokenUsage, tariff: Tariff, *, relayed: bool = True) -> tuple[int, int]:
    """What the tenant is charged and what it cost, in nano-USD, never more than Redis can count.

    A failed request is charged only if some of its answer was ``relayed``; what it cost is told all the same.
    """
    cost = min(tariff.cost_of(usage), MAX_AMOUNT)
    free = status == "failed" and not (relayed and usage.completion_tokens)
    return 0 if free else min(tariff.charged(usage), MAX_AMOUNT), cost


class Saving(msgspec.Struct, frozen=True):
    """That a kept answer spared asking a backend."""

    tier: Literal["exact", "semantic"]
    usage: TokenUsage
    """What the answer took when it was made."""
    price_bp: int
    """What the hit costs, in hundredths of a percent of what the answer would have cost."""


def plausible(usage: TokenUsage) -> TokenUsage:
    """``usage`` itself, or what is left of it when a backend reports what cannot be: below 0, or beyond reason."""
    counts = (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.cached_tokens,
        usage.cache_write_tokens,
        usage.reasoning_tokens,
        usage.images,
    )
    if min(counts) >= 0 and max(counts) <= MAX_TOKENS and 0 <= usage.compute_us <= MAX_AMOUNT:
        return usage
    log.error("a backend reports impossible usage, which is corrected: %s", usage)
    return replace(usage, **{name: min(max(getattr(usage, name), 0), most) for name, most in _MOST.items()})


class Hold(msgspec.Struct, frozen=True):
    """What an admission has taken from, as its settlement and a restoration must name it. Packed for the scripts."""

    counters: bytes
    who: bytes
    end_user: str


class Ticket:
    """One admitted request. It must be settled; if its gateway dies first, the janitor settles it as abandoned."""

    def __init__(
        self,
        *,
        request_id: UUID,
        id_text: str,
        keys: TenantKeys,
        principal: Principal,
        draft: Draft,
        admitted_at: datetime,
        bound: Bound,
        hold: Hold,
        headers: dict[str, str],
        tight: bool,
        clock: Clock,
        submit: Callable[[Ticket, UsageEvent, bool], Settlement],
    ) -> None:
        self.request_id = request_id
        self.id_text = id_text
        self.keys = keys
        self.principal = principal
        self.draft = draft
        self.admitted_at = admitted_at
        """Redis' time of the admission, in UTC. It decides window, budget period, price, row and report."""
        self.bound = bound
        self.hold = hold
        self.headers = headers
        """``x-ratelimit-*`` for the answer; empty without limits on either."""
        self.tight = tight
        """Another such request would have been refused beside this one."""
        self.event: UsageEvent | None = None
        """The settled row, once ``settle`` was called."""
        self.resumed = False
        """The janitor has settled it already, as this gateway has learned since: its settlement will be a revision."""
        self._clock = clock
        self._submit = submit
        self._begun = clock.monotonic()
        self._usage = _NO_USAGE
        self._backend: str | None = None
        self._kept: TokenUsage | None = _NO_USAGE
        self._settlement: Settlement | None = None

    def reprice(self, tariff: Tariff) -> None:
        """Other prices came into force before the admission: the row goes by these, though other ones were reserved by.
        A price that ended is kept, since the request was let in by it."""
        if tariff is not self.draft.tariff and tariff.charge is not None and tariff != self.draft.tariff:
            self.draft = replace(self.draft, tariff=tariff)

    def checkpoint(self, usage: TokenUsage, backend: str | None) -> None:
        """Remember running totals; the next heartbeat writes them to Redis. Cheap, to be called for each chunk."""
        self._usage = usage
        self._backend = backend

    def settle(
        self,
        status: Status,
        usage: TokenUsage | None = None,
        *,
        backend: str | None = None,
        attempts: int = 1,
        error_code: str | None = None,
        first_token_ms: int | None = None,
        queue_ms: int | None = None,
        relayed: bool = True,
        wasted: Sequence[TokenUsage] = (),
        failed_attempts: Sequence[str] = (),
        saving: Saving | None = None,
    ) -> None:
        """End the request: frees its slot, returns its reservation, charges it. Later calls are ignored.

        ``usage``: final totals; the last checkpoint if None. ``relayed``: whether any of its answer reached the client,
        without which a failed request is not charged. ``attempts``: backends tried; a failed request that
        reached none is given back to its limits on requests. ``wasted``: what attempts before the last one used, which
        costs us and is not charged. ``failed_attempts``: backend and error code of each. ``saving``: of a kept
        answer, which is charged as it has it. The write
        runs in tasks of Admission, out of reach of the caller's cancellation, and is repeated until Redis has taken it.
        """
        if self.event is not None:
            return
        if usage is not None:
            self._usage = usage
        self._usage = plausible(self._usage)
        if backend is not None:
            self._backend = backend
        total_ms = round(self.age_s * 1000)
        self.event = self._row(
            status,
            attempts=attempts,
            error_code=error_code,
            first_token_ms=first_token_ms,
            total_ms=total_ms,
            queue_ms=queue_ms,
            relayed=relayed,
            wasted=wasted,
            failed_attempts=failed_attempts,
        )
        if saving is not None:
            self.event = self._saved_by(saving, self.event)
        self._settlement = self._submit(self, self.event, status == "failed" and attempts == 0)

    def _saved_by(self, saving: Saving, row: UsageEvent) -> UsageEvent:
        usage = plausible(saving.usage)
        whole, _ = charge("ok", usage, self.draft.tariff)
        charged = rounded(whole * saving.price_bp, 10_000)
        tokens = min(usage.prompt_tokens + usage.completion_tokens, MAX_TOKENS)
        return replace(
            row,
            charged_nano_usd=charged,
            cost_nano_usd=0,
            over_bound=charged > self.bound.nano_usd,
            cache=saving.tier,
            saved_nano_usd=whole - charged,
            saved_tokens=tokens,
        )

    async def settled(self) -> None:
        """Wait until the settlement is written, or Redis could not take it and it is being retried."""
        if self._settlement is not None:
            await asyncio.shield(self._settlement.attempted)

    async def sent(self) -> None:
        """Wait until whoever asks once more, be it through another gateway, finds this one's slot and budget free.

        That is when its settlement is written if the request is ``tight``; else it is enough that it is on its way to
        Redis. While Redis is away or hangs, as ``settled``.
        """
        if self.tight:
            await self.settled()
        elif self._settlement is not None:
            await self._settlement.sent()

    @property
    def age_s(self) -> float:
        """Seconds since the admission."""
        return self._clock.monotonic() - self._begun

    @property
    def charged_nano_usd(self) -> int:
        """What the tenant is charged: final once settled, until then what the last checkpoint comes to."""
        return self.event.charged_nano_usd if self.event else charge("abandoned", self._usage, self.draft.tariff)[0]

    def unsaved(self) -> tuple[TokenUsage, UsageEvent] | None:
        """The last checkpoint and the row that the janitor should write from it; None if Redis has it already."""
        self._usage = plausible(self._usage)
        return None if self._usage is self._kept else (self._usage, self.abandoned())

    def saved(self, usage: TokenUsage) -> None:
        """Redis has the checkpoint ``usage``."""
        self._kept = usage

    def abandoned(self) -> UsageEvent:
        """The row as it would be if this gateway died now."""
        return self._row("abandoned", attempts=1 if self._backend else 0)

    def _row(
        self,
        status: Status,
        *,
        attempts: int,
        error_code: str | None = None,
        first_token_ms: int | None = None,
        total_ms: int | None = None,
        queue_ms: int | None = None,
        relayed: bool = True,
        wasted: Sequence[TokenUsage] = (),
        failed_attempts: Sequence[str] = (),
    ) -> UsageEvent:
        draft, usage = self.draft, self._usage
        charged, cost = charge(status, usage, draft.tariff, relayed=relayed)
        cost = min(cost + sum(draft.tariff.cost_of(plausible(each)) for each in wasted), MAX_AMOUNT)
        return UsageEvent(
            request_id=self.request_id,
            admitted_at=self.admitted_at,
            tenant_id=self.principal.tenant_id,
            key_id=self.principal.key_id,
            route=draft.route,
            status=status,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            usage_source=usage.source,
            charged_nano_usd=charged,
            cost_nano_usd=cost,
            price_id=draft.tariff.price_id,
            over_bound=charged > self.bound.nano_usd,
            streamed=draft.streamed,
            backend=self._backend,
            attempts=attempts,
            failed_attempts=list(failed_attempts),
            api=draft.api,
            error_code=error_code,
            client_request_id=draft.client_request_id,
            first_token_ms=first_token_ms,
            total_ms=total_ms,
            project_id=self.principal.project_id,
            end_user=draft.end_user,
            cache_write_tokens=usage.cache_write_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            images=usage.images,
            compute_us=usage.compute_us,
            cost_price_id=draft.tariff.cost_price_id,
            markup_bp=draft.tariff.applied_markup_bp,
            queue_ms=queue_ms,
            tags=list(draft.tags),
        )


def blank(request_id: UUID, principal: Principal, draft: Draft) -> UsageEvent:
    """The row of a request that was admitted and of which nothing more is known; ``admitted_at`` is not told."""
    tariff = draft.tariff
    return UsageEvent(
        request_id=request_id,
        admitted_at=_NEVER,
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        route=draft.route,
        status="abandoned",
        prompt_tokens=0,
        completion_tokens=0,
        charged_nano_usd=0,
        cost_nano_usd=0,
        price_id=tariff.price_id,
        streamed=draft.streamed,
        api=draft.api,
        client_request_id=draft.client_request_id,
        project_id=principal.project_id,
        end_user=draft.end_user,
        cost_price_id=tariff.cost_price_id,
        markup_bp=tariff.applied_markup_bp,
        tags=list(draft.tags),
    )


class Blank:
    """The JSON of ``blank`` rows, around the time that Redis fills in. What it made last serves for a draft that says
    the same."""

    __slots__ = ("_behind", "_draft", "_principal")

    def __init__(self) -> None:
        self._principal: Principal | None = None
        self._draft: Draft | None = None
        self._behind = b""

    def around(self, request_id: str, principal: Principal, draft: Draft) -> tuple[bytes, bytes]:
        before = b'{"request_id":"%b","admitted_at":"' % request_id.encode()
        if self._principal is not principal or self._draft != draft:
            head, self._behind = encode_around(blank(UUID(request_id), principal, draft))
            assert head == before
            self._principal, self._draft = principal, draft
        return before, self._behind


def encode(event: UsageEvent) -> bytes:
    return _encoder.encode(event)


def encode_around(event: UsageEvent) -> tuple[bytes, bytes]:
    """The event's JSON before and after ``admitted_at``, which Redis fills in."""
    marker = _encoder.encode(event.admitted_at)[1:-1]
    before, found, after = _encoder.encode(event).partition(b'"admitted_at":"' + marker)
    assert found
    return before + b'"admitted_at":"', after
