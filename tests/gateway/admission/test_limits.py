"""Limits of every subject: whom they count, what they refuse, what they say of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gateway.admission import keys
from gateway.admission.errors import Refused
from gateway.admission.plan import Counter
from gateway.admission.service import Admission
from gateway.admission.ticket import Draft, Ticket
from gateway.billing.usage import TokenUsage
from gateway.ids import uuid7
from gateway.redis_url import client as redis_client
from gateway.tenants.principal import Metric, Principal
from tests.gateway.admission.support import DRAFT, TARIFF, Ledger, advance, limit, take, tenant

ADA, BOB = Draft("tiny", TARIFF, end_user="ada"), Draft("tiny", TARIFF, end_user="bob")
LARGE = Draft("large", TARIFF)


async def refused(
    gate: Admission, principal: Principal, bound: int = 0, draft: Draft = DRAFT, *, tokens: int = 0
) -> Refused:
    with pytest.raises(Refused) as caught:
        await take(gate, principal, bound, draft, tokens=tokens)
    return caught.value


async def end(ticket: Ticket, *used: int) -> None:
    ticket.settle("ok", TokenUsage(*used))
    await ticket.settled()


# Whom a limit counts


@pytest.mark.parametrize("metric", ["requests", "tokens", "concurrent", "budget"])
async def test_a_keys_limit_is_its_own(gate: Admission, metric: Metric) -> None:
    tenant_id, own = uuid7(), limit(metric, 10 if metric in ("tokens", "budget") else 1, None, "key", "key1")
    first = tenant(None, None, None, own, tenant_id=tenant_id)
    other = tenant(None, None, None, tenant_id=tenant_id, key="key2")
    await take(gate, first, 10, tokens=10)
    await take(gate, other, 10, tokens=10)
    told = await refused(gate, first, 10, tokens=10)
    assert (told.reason, told.subject, told.limit) == (metric, "key", own.amount)
    await take(gate, other, 10, tokens=10)


async def test_keys_of_a_project_share_its_limit(gate: Admission) -> None:
    tenant_id, project = uuid7(), uuid7()
    shared = limit("budget", 100, "month", "project", str(project))
    one = tenant(None, None, None, shared, tenant_id=tenant_id, project=project)
    two = tenant(None, None, None, shared, tenant_id=tenant_id, project=project, key="key2")
    elsewhere = tenant(None, None, None, shared, tenant_id=tenant_id, project=uuid7(), key="key3")
    await take(gate, one, 60)
    told = await refused(gate, two, 41)
    assert (told.reason, told.subject, told.window, told.remaining) == ("budget", "project", "month", 40)
    await take(gate, elsewhere, 1000)
    await take(gate, two, 40)


async def test_a_models_limit_counts_the_tenants_requests_of_that_route(gate: Admission) -> None:
    principal = tenant(None, None, None, limit("requests", 1, "hour", "model", "large"))
    await take(gate, principal, draft=LARGE)
    await take(gate, principal)
    told = await refused(gate, principal, draft=LARGE)
    assert (told.subject, told.window) == ("model", "hour")
    stranger = tenant(None, None, None, limit("requests", 1, "hour", "model", "large"))
    await take(gate, stranger, draft=LARGE)


async def test_end_users_have_a_limit_each(gate: Admission) -> None:
    principal = tenant(
        None, None, None, limit("concurrent", 1, None, "end_user"), limit("budget", 100, "day", "end_user")
    )
    ada = await take(gate, principal, 90, ADA)
    await take(gate, principal, 90, BOB)
    assert (await refused(gate, principal, 5, ADA)).reason == "concurrent"
    await end(ada, 0, 0)
    await take(gate, principal, 90, ADA)
    await take(gate, principal, 1000)  # of nobody
    await take(gate, principal, 1000)


async def test_an_end_user_may_have_one_of_its_own_besides(gate: Admission) -> None:
    principal = tenant(
        None, None, None, limit("requests", 3, "day", "end_user"), limit("requests", 1, "day", "end_user", "ada")
    )
    await take(gate, principal, draft=ADA)
    told = await refused(gate, principal, draft=ADA)
    assert told.limit == 1
    for _ in range(3):
        await take(gate, principal, draft=BOB)
    assert (await refused(gate, principal, draft=BOB)).limit == 3


# Tokens


async def test_tokens_are_reserved_by_their_bound_and_corrected_where_they_were_taken(gate: Admission) -> None:
    principal = tenant(None, None, None, limit("tokens", 100))
    first = await take(gate, principal, tokens=80)
    assert first.headers["x-ratelimit-remaining-tokens"] == "20"
    told = await refused(gate, principal, tokens=21)
    assert (told.reason, told.window, told.remaining) == ("tokens", "minute", 20)
    assert told.headers["x-ratelimit-limit-tokens"] == "100"
    advance(30, gate)
    await end(first, 10, 5)
    second = await take(gate, principal, tokens=85)
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"
    advance(31, gate)  # the first has left, with its fifteen tokens
    third = await take(gate, principal, tokens=15)
    assert third.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_more_than_its_bound_is_counted_all_the_same(gate: Admission) -> None:
    principal = tenant(None, None, None, limit("tokens", 100, "day"))
    await end(await take(gate, principal, tokens=10), 90, 60)
    assert (await refused(gate, principal, tokens=1)).remaining == 0
    found = await gate.counters(principal.tenant_id)
    assert found.windows == {Counter("tokens", "day", "tenant", ""): 150}


async def test_no_wait_helps_a_request_of_more_tokens_than_the_limit(gate: Admission) -> None:
    assert (await refused(gate, tenant(None, None, None, limit("tokens", 10)), tokens=11)).retry_after_s is None
    assert (await refused(gate, tenant(None, None, None, limit("tokens", 0)), tokens=0)).retry_after_s is None


@pytest.mark.parametrize(("window", "length_s"), [("minute", 60), ("hour", 3600), ("day", 86_400)])
async def test_retry_after_is_when_it_passes(gate: Admission, window: str, length_s: int) -> None:
    principal = tenant(None, None, None, limit("tokens", 10, window), limit("requests", 2, window))  # type: ignore[arg-type]
    await take(gate, principal, tokens=4)
    advance(length_s / 2, gate)
    await take(gate, principal, tokens=6)
    told = await refused(gate, principal, tokens=4)
    assert told.retry_after_s is not None
    assert length_s / 2 - 5 < told.retry_after_s <= length_s / 2 + length_s / 60 + 1
    advance(told.retry_after_s - 3, gate)
    await refused(gate, principal, tokens=4)
    advance(3, gate)
    await take(gate, principal, tokens=4)


# What the answer tells


async def test_headers_tell_of_the_tightest_limit(gate: Admission) -> None:
    principal = tenant(
        None,
        None,
        None,
        limit("requests", 9, "minute"),
        limit("requests", 3, "day", "key", "key1"),
        limit("requests", 1, "hour", hard=False),
        limit("tokens", 500, "hour"),
        limit("tokens", 70, "minute", "model", "large"),
    )
    assert (await take(gate, principal, tokens=50)).headers == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "0s",
        "x-ratelimit-limit-tokens": "500",
        "x-ratelimit-remaining-tokens": "450",
        "x-ratelimit-reset-tokens": "0s",
    }
    headers = (await take(gate, principal, draft=LARGE, tokens=50)).headers
    assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("70", "20")
    assert headers["x-ratelimit-reset-tokens"] != "0s"  # another such request would have to wait


async def test_a_soft_limit_refuses_nobody_and_counts(gate: Admission) -> None:
    principal = tenant(
        None,
        None,
        None,
        limit("requests", 1, hard=False),
        limit("tokens", 1, hard=False),
        limit("concurrent", 1, hard=False),
        limit("budget", 1, hard=False),
    )
    for _ in range(3):
        ticket = await take(gate, principal, 20_000, tokens=10)
        assert ticket.headers == {}
    await end(ticket, 10, 5)
    found = await gate.counters(principal.tenant_id)
    assert [(each.spent, each.reserved) for each in found.budgets] == [(20_000, 40_000)]
    assert sorted(found.windows.values()) == [3, 35]


async def test_what_is_free_passes_a_budget_that_is_overdrawn(gate: Admission) -> None:
    principal = tenant(budget=100)
    await end(await take(gate, principal, 100), 1, 0)  # 1,000 nano-USD
    await take(gate, principal, 0)
    await refused(gate, principal, 1)


# Limits that come and go


async def test_slots_of_a_new_limit_are_held_by_who_runs_already(gate: Admission) -> None:
    tenant_id = uuid7()
    before = tenant(tenant_id=tenant_id)
    running = await take(gate, before, draft=ADA)
    per_key, per_user = limit("concurrent", 1, None, "key", "key1"), limit("concurrent", 1, None, "end_user")
    after = tenant(None, None, None, per_key, per_user, tenant_id=tenant_id, generation=2)
    assert (await refused(gate, after)).subject == "key"
    only_users = tenant(None, None, None, per_user, tenant_id=tenant_id, generation=3)
    assert (await refused(gate, only_users, draft=ADA)).subject == "end_user"
    await end(running, 0, 0)
    await take(gate, after_back := tenant(None, None, None, per_key, tenant_id=tenant_id, generation=4))
    await refused(gate, after_back)


async def test_a_budget_of_an_end_user_counts_what_was_spent_before_it(gate: Admission, ledger: Ledger) -> None:
    tenant_id = uuid7()
    free = tenant(tenant_id=tenant_id)
    for draft in (ADA, BOB, DRAFT):
        await end(await take(gate, free, draft=draft), 10, 0)
    ledger.drain(free.shard)
    await end(await take(gate, free, draft=ADA), 10, 0)
    running = await take(gate, free, 5_000, ADA)
    limited = tenant(None, None, None, limit("budget", 30_000, "month", "end_user"), tenant_id=tenant_id, generation=2)
    assert (await refused(gate, limited, 5_001, ADA)).remaining == 5_000
    await take(gate, limited, 20_000, BOB)
    await end(running, 1, 0)
    await take(gate, limited, 9_000, ADA)
    await refused(gate, limited, 1, ADA)


async def test_a_window_given_back_counts_what_came_meanwhile(gate: Admission) -> None:
    tenant_id = uuid7()
    for each in (limit("requests", 9, "hour"), None, limit("requests", 3, "hour")):
        principal = tenant(None, None, None, *([each] if each else []), tenant_id=tenant_id)
        ticket = await take(gate, principal)
        await end(ticket, 1, 0)
        advance(70, gate)
    assert (await refused(gate, principal)).remaining == 0


# Thresholds


def alerts(redis_url: str, principal: Principal) -> list[tuple[str, int, int]]:
    """Target, threshold and spent of the tenant's alerts."""
    with redis_client(redis_url) as client:
        found = client.execute_command("XRANGE", keys.alerts(principal.shard), "-", "+")
    told = [msgspec.json.decode(fields[b"alert"]) for _, fields in found]
    return [
        (each["target"], each["threshold"], each["spent"])
        for each in told
        if each["tenant_id"] == str(principal.tenant_id)
    ]


async def test_crossed_thresholds_are_told_once_a_period(gate: Admission, redis_url: str) -> None:
    watched = limit("budget", 100_000, "day", hard=False, thresholds=(50, 80, 120))
    principal = tenant(None, None, None, watched)
    for _ in range(13):
        await end(await take(gate, principal, 10_000), 10, 0)
    assert alerts(redis_url, principal) == [("", 50, 50_000), ("", 80, 80_000), ("", 120, 120_000)]
    advance(86_400, gate)
    await end(await take(gate, principal, 10_000), 60, 0)
    assert alerts(redis_url, principal)[3:] == [("", 50, 60_000)]
    with redis_client(redis_url) as client:
        [(_, fields), *_] = client.execute_command("XRANGE", keys.alerts(principal.shard), "-", "+")
    told = msgspec.json.decode(fields[b"alert"])
    day_ms = 86_400_000
    assert told["period_start_ms"] == told["at_ms"] // day_ms * day_ms
    assert {name: told[name] for name in ("limit_id", "subject", "window", "amount")} == {
        "limit_id": str(watched.id),
        "subject": "tenant",
        "window": "day",
        "amount": 100_000,
    }


async def test_the_janitor_tells_of_thresholds_too_and_each_end_user_has_its_own(
    gate: Admission, redis_url: str
) -> None:
    hostile = Draft("tiny", TARIFF, end_user='a"\\\n')
    principal = tenant(None, None, None, limit("budget", 1_000, "total", "end_user", thresholds=(100,)))
    for draft in (hostile, BOB):
        ticket = await take(gate, principal, 1_000, draft)
        ticket.checkpoint(TokenUsage(1, 0), "w1")
    await gate._leases.renew()
    advance(10, gate)
    assert await gate.expire_leases() == 2
    assert sorted(alerts(redis_url, principal)) == [('a"\\\n', 100, 1_000), ("bob", 100, 1_000)]


async def test_thresholds_follow_a_limit_that_was_changed(gate: Admission, redis_url: str) -> None:
    tenant_id = uuid7()
    first = limit("budget", 100_000, thresholds=(10,))
    await end(await take(gate, principal := tenant(None, None, None, first, tenant_id=tenant_id), 5_000), 5, 0)
    changed = replace(first, amount=10_000, thresholds=(60, 100))
    await end(await take(gate, tenant(None, None, None, changed, tenant_id=tenant_id, generation=2), 5_000), 2, 0)
    assert alerts(redis_url, principal) == [("", 60, 7_000)]
    silent = replace(changed, thresholds=())
    await end(await take(gate, tenant(None, None, None, silent, tenant_id=tenant_id, generation=3), 1_000), 9, 0)
    assert alerts(redis_url, principal) == [("", 60, 7_000)]
