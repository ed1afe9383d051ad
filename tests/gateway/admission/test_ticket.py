from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.service import Admission
from gateway.admission.ticket import Draft, Saving, blank, charge, encode_around
from gateway.billing.prices import Tariff
from gateway.billing.usage import Status, TokenUsage, UsageEvent
from gateway.ids import uuid7
from tests.gateway.admission.support import DRAFT, PRICE, TARIFF, Ledger, take, tenant, totals


@pytest.mark.parametrize(
    ("status", "completion_tokens", "charged"),
    [("ok", 5, 20_000), ("aborted", 5, 20_000), ("abandoned", 5, 20_000), ("failed", 5, 20_000), ("failed", 0, 0),
     ("aborted", 0, 10_000), ("ok", 0, 10_000)],
)  # fmt: skip
def test_who_pays_for_what(status: Status, completion_tokens: int, charged: int) -> None:
    usage = TokenUsage(10, completion_tokens)
    assert charge(status, usage, TARIFF) == (charged, PRICE.amount(usage))


def test_unpriced_is_charged_nothing() -> None:
    assert charge("ok", TokenUsage(10, 5), Tariff(None, None)) == (0, 0)


@given(st.text(max_size=50))
def test_the_admission_time_goes_where_it_belongs(hostile: str) -> None:
    event = msgspec.structs.replace(
        _event(), route=hostile, key_id='"admitted_at":"1970', client_request_id=hostile + '"admitted_at":"'
    )
    before, after = encode_around(event)
    stamped = msgspec.json.decode(before + b"2026-11-29T17:43:19.606Z" + after, type=UsageEvent)
    assert stamped.admitted_at.isoformat() == "2026-11-29T17:43:19.606000+00:00"
    assert msgspec.structs.replace(stamped, admitted_at=event.admitted_at) == event


def _event() -> UsageEvent:
    return UsageEvent(
        request_id=uuid7(), admitted_at=PRICE.effective_from, tenant_id=uuid7(), key_id="k", route="r",
        status="abandoned", prompt_tokens=0, completion_tokens=0, charged_nano_usd=0, cost_nano_usd=0, price_id=None,
    )  # fmt: skip


async def test_the_row_tells_the_whole_story(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(budget=10**9)
    ticket = await take(gate, principal, 20_000, Draft("tiny", TARIFF, streamed=True, client_request_id="theirs"))
    ticket.settle(
        "failed", TokenUsage(10, 6, 3, "counted"), backend="w1", attempts=2, error_code="upstream", first_token_ms=7
    )
    await ticket.settled()
    [row] = ledger.events(principal)
    assert row == ticket.event
    assert row.request_id == ticket.request_id
    assert row.admitted_at == ticket.admitted_at
    assert (row.tenant_id, row.key_id, row.route, row.status) == (principal.tenant_id, "key1", "tiny", "failed")
    assert (row.prompt_tokens, row.completion_tokens, row.cached_tokens, row.usage_source) == (10, 6, 3, "counted")
    assert (row.charged_nano_usd, row.cost_nano_usd, row.price_id) == (22_000, 22_000, PRICE.id)
    assert row.over_bound
    assert (row.streamed, row.backend, row.attempts, row.error_code) == (True, "w1", 2, "upstream")
    assert (row.client_request_id, row.first_token_ms) == ("theirs", 7)
    assert row.total_ms is not None
    assert row.total_ms >= 0


async def test_settling_twice_changes_nothing(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(budget=10**9)
    ticket = await take(gate, principal, 50_000)
    ticket.settle("ok", TokenUsage(10, 5))
    ticket.settle("failed", TokenUsage(99, 99))
    await ticket.settled()
    assert ticket.charged_nano_usd == 20_000
    assert [row.status for row in ledger.events(principal)] == ["ok"]
    assert (await totals(gate, principal.tenant_id)).spent == 20_000


async def test_without_totals_the_last_checkpoint_counts(gate: Admission, ledger: Ledger) -> None:
    principal = tenant()
    ticket = await take(gate, principal)
    ticket.checkpoint(TokenUsage(10, 1), "w1")
    ticket.checkpoint(TokenUsage(10, 4), "w1")
    assert ticket.charged_nano_usd == 18_000
    ticket.settle("aborted")
    await ticket.settled()
    [row] = ledger.events(principal)
    assert (row.completion_tokens, row.charged_nano_usd, row.backend) == (4, 18_000, "w1")


async def test_zero_tokens_are_a_value(gate: Admission, ledger: Ledger) -> None:
    principal = tenant()
    ticket = await take(gate, principal)
    ticket.checkpoint(TokenUsage(10, 4), "w1")
    ticket.settle("ok", TokenUsage(0, 0))
    await ticket.settled()
    assert ledger.events(principal)[0].charged_nano_usd == 0


async def test_a_settlement_outlives_the_handler_that_asked_for_it(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(slots=1, budget=10**9)
    ticket = await take(gate, principal, 50_000, DRAFT)

    async def handler() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ticket.settle("aborted", TokenUsage(10, 5))
            await ticket.settled()

    task = asyncio.ensure_future(handler())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # and again, while it waits for the write
    await asyncio.wait([task])
    await ticket.settled()
    assert [row.status for row in ledger.events(principal)] == ["aborted"]
    counters = await totals(gate, principal.tenant_id)
    assert (counters.live, counters.reserved, counters.spent) == (0, 0, 20_000)


async def test_impossible_usage_is_corrected(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(budget=10**9)
    for usage in (TokenUsage(-5, 10, -1), TokenUsage(10**30, 1)):
        ticket = await take(gate, principal)
        ticket.checkpoint(usage, "w1")
        await gate._leases.renew()
        ticket.settle("ok", usage)
        await ticket.settled()
    assert gate._settlements.waiting == 0
    first, second = ledger.events(principal)
    assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (0, 10, 0)
    assert first.charged_nano_usd == 20_000
    assert (second.prompt_tokens, second.charged_nano_usd) == (10**12, 10**15 + 2000)


def test_a_row_of_which_nothing_more_is_known_tells_all_that_is() -> None:
    draft = Draft("tiny", TARIFF, streamed=True, client_request_id="theirs", end_user="e", tags=("x",), api="messages")
    row = blank(uuid7(), tenant(), draft)
    assert (row.route, row.streamed, row.client_request_id) == ("tiny", True, "theirs")
    assert (row.end_user, row.tags, row.api) == ("e", ["x"], "messages")
    assert (row.status, row.charged_nano_usd, row.price_id) == ("abandoned", 0, PRICE.id)


async def test_a_kept_answer_is_charged_as_its_tenant_wants(gate: Admission, ledger: Ledger) -> None:
    principal = tenant(budget=10**9)
    made_of = TokenUsage(10, 5)
    whole = charge("ok", made_of, TARIFF)[0]
    for price_bp, charged in ((0, 0), (2_500, (whole + 2) // 4), (10_000, whole)):
        ticket = await take(gate, principal, 50_000)
        ticket.settle("cache_hit", TokenUsage(), attempts=0, saving=Saving("exact", made_of, price_bp))
        await ticket.settled()
        row = ledger.events(principal)[-1]
        assert (row.status, row.cache, row.charged_nano_usd, row.cost_nano_usd) == ("cache_hit", "exact", charged, 0)
        assert (row.saved_nano_usd, row.saved_tokens) == (whole - charged, 15)
        assert (row.prompt_tokens, row.completion_tokens) == (0, 0)
