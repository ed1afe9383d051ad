"""What a hit costs, saves and gives back, in the row, the head, the reports and the counters."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.policies.answer_cache import CachePolicy
from gateway.tenants.specs import LimitSpec
from tests.gateway.conftest import price_spec
from tests.gateway.http.cache_support import CHAT, asking, being_kept, change, client_of, model, patient
from tests.gateway.http.shared_gateway import Shared, SharedGateway, shared_gateway
from tests.gateway.tenants.support import ACTOR

pytestmark = pytest.mark.asyncio(loop_scope="module")

PER_REQUEST = 1001
"""Nano-USD."""
WHOLE = 9 * 1000 + 6 * 2000 + PER_REQUEST
LIMITS = [
    LimitSpec(metric="budget", window="day", amount=10**12),
    LimitSpec(metric="tokens", window="hour", amount=10**9),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: Any, redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    with patient():
        folder = tmp_path_factory.mktemp("gateway")
        async with shared_gateway(databases, redis_server, folder, limits=LIMITS) as made:
            await made.script(model)
            view = await made.view()
            await view.prices.set_price(ACTOR, price_spec("m", "1", "2", usd_per_request=Decimal(PER_REQUEST) / 10**9))
            (route,) = await view.catalog.routes()
            await view.create_route(replace(route, name="free", unpriced="serve"))
            yield made


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: Shared) -> AsyncIterator[SharedGateway]:
    yield await shared.view()
    shared.check()


async def remaining(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize(("price_bp", "price"), [(0, 0), (1, 2), (5000, 11_000), (10_000, WHOLE)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_hit_costs_its_share_of_the_price(gateway: Any, price_bp: int, price: int, stream: bool) -> None:
    await change(gateway, CachePolicy(mode="exact", hit_price_bp=price_bp))
    ask = asking(f"How much? {price_bp} {stream}", stream=stream)
    async with client_of(gateway) as client:
        async with being_kept(gateway):
            await client.post(CHAT, json=ask)
        hit = await client.post(CHAT, json=ask)
        after = await client.post(CHAT, json=ask)
    assert hit.headers["x-penstock-cache"] == "exact"
    # What the hits had reserved is free again, and they count no tokens.
    assert await remaining(after) == await remaining(hit)
    if not stream:
        assert hit.headers["x-penstock-cost-usd"] == f"0.{price:09}"
    paid, *kept = await gateway.rows(3)
    assert (paid.status, paid.charged_nano_usd, paid.saved_nano_usd, paid.cache) == ("ok", WHOLE, 0, None)
    for row in kept:
        assert (row.status, row.cache, row.attempts, row.backend) == ("cache_hit", "exact", 0, None)
        assert (row.charged_nano_usd, row.saved_nano_usd, row.cost_nano_usd) == (price, WHOLE - price, 0)
        assert (row.prompt_tokens, row.completion_tokens, row.saved_tokens) == (0, 0, 15)
        assert (row.streamed, row.over_bound, row.price_id) == (stream, False, paid.price_id)


async def test_reports_tell_hits_and_savings(gateway: Any) -> None:
    rows = await gateway._gateway._rows()
    hits = [row for row in rows if row.status == "cache_hit"]
    assert hits
    async with client_of(gateway, gateway.admin_key) as client:
        asked = {"tenant": "acme", "start": "2026-01-01T00:00:00Z", "end": "2030-01-01T00:00:00Z"}
        page = (await client.get("/admin/v1/usage", params=asked)).json()
        assert "data" in page, page
        table = (await client.get("/admin/v1/usage", params=asked | {"format": "csv", "group_by": "model"})).text
    (told,) = page["data"]
    assert told["requests_by_status"]["cache_hit"] == len(hits)
    assert told["saved_tokens"] == 15 * len(hits)
    assert told["saved_nano_usd"] == sum(row.saved_nano_usd for row in hits)
    assert told["charged_nano_usd"] == sum(row.charged_nano_usd for row in rows)
    assert told["cache_hit_rate"] == pytest.approx(len(hits) / len(rows), abs=1e-6)
    line, *_ = csv.DictReader(io.StringIO(table))
    assert int(line["saved_nano_usd"]) == told["saved_nano_usd"]
    assert float(line["cache_hit_rate"]) == told["cache_hit_rate"]


async def test_an_unpriced_hit_costs_nothing(gateway: Any) -> None:
    await change(gateway, CachePolicy(mode="exact", hit_price_bp=10_000))
    ask = asking("Free?") | {"model": "free"}
    async with client_of(gateway) as client:
        async with being_kept(gateway):
            assert (first := await client.post(CHAT, json=ask)).status_code == 200, first.text
            assert first.headers["x-penstock-cache"] == "miss"
        assert (await client.post(CHAT, json=ask)).headers["x-penstock-cache"] == "exact"
    row = (await gateway.rows(2))[1]
    assert (row.status, row.charged_nano_usd, row.saved_nano_usd, row.saved_tokens) == ("cache_hit", 0, 0, 15)
    assert row.price_id is None
