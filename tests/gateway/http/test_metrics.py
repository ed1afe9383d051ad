from __future__ import annotations

from typing import Any

import httpx

from tests.gateway.conftest import Gateway, GatewayFactory

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_a_request_shows_in_the_metrics(gateway: Gateway, upstream: Any) -> None:
    async def answer(c: Any) -> None:
        await c.whole()

    await gateway.register(await upstream(answer))
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        mine = {"authorization": f"Bearer {gateway.key}"}
        assert (await client.post("/v1/chat/completions", json=ASK, headers=mine)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 401
        answered = await client.get("/metrics")
        for name in ("X-Forwarded-For", "X-Forwarded-Proto", "Via", "CF-Ray"):
            refused = await client.get("/metrics", headers={name: "203.0.113.7"})
            assert refused.status_code == 403
    assert answered.headers["content-type"].startswith("text/plain; version=0.0.4")
    told = answered.text
    assert 'penstock_requests_total{api="chat_completions",route="m",status="ok"} 1.0' in told
    assert 'penstock_refusals_total{code="invalid_api_key"} 1.0' in told
    assert 'penstock_backend_attempts_total{backend="w1",outcome="ok"} 1.0' in told
    assert 'penstock_tokens_total{kind="completion",route="m"} 3.0' in told
    assert "penstock_open_requests 0.0" in told
    assert gateway.key not in told
    assert "acme" not in told
    assert (refused.status_code, refused.headers["content-type"]) == (403, "application/problem+json")


async def test_with_a_token_nobody_reads_without_it(start_gateway: GatewayFactory) -> None:
    token = "token-of-the-scraper-1"
    async with start_gateway(metrics_token=token) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers={"authorization": "Bearer wrong"})).status_code == 401
        from_afar = {"authorization": f"Bearer {token}", "x-forwarded-for": "203.0.113.7"}
        assert (await client.get("/metrics", headers=from_afar)).status_code == 200
