"""What was said by requests that run while it is erased: no room keeps it when they end."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway.policies.answer_cache import CachePolicy
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.redis_url import ClusterAddress, parse_redis_url
from gateway.tenants.specs import TenantChange
from tests.gateway.conftest import Conversation, chunk_event, whole_event
from tests.gateway.tenants.support import ACTOR

ASK = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}


@pytest.mark.parametrize(
    ("whose", "stream"),
    [("tenant", False), ("tenant", True), ("end_user", False), ("end_user", True), ("request", True)],
)
async def test_a_request_that_runs(start_gateway: Any, upstream: Any, redis_url: str, whose: str, stream: bool) -> None:
    if isinstance(parse_redis_url(redis_url), ClusterAddress):
        pytest.skip("the prompt log wants one server, not a cluster")
    erased = asyncio.Event()

    async def slow(c: Conversation) -> None:
        if not stream:
            await erased.wait()
            await c.whole(whole_event("Paris"))
            return
        await c.begin()
        await c.token("Par", 1)
        await erased.wait()
        await c.token("is", 2)
        await c.event(chunk_event("", finish="stop"))
        await c.meter(9, 3)
        await c.done()

    async with start_gateway() as gateway:
        backend = await upstream(slow)
        await gateway.register(backend)
        policies = TenantChange(answer_cache=CachePolicy(mode="exact"), prompt_log=PromptLogPolicy(level="full"))
        await gateway.directory.update_tenant(ACTOR, "acme", policies)
        headers = {"authorization": f"Bearer {gateway.key}", "x-penstock-end-user": "ann"}
        admin = {"authorization": f"Bearer {gateway.admin_key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client, asyncio.timeout(30):
            body, once = ASK | {"stream": stream}, {"idempotency-key": "once"}
            request = client.build_request("POST", "/v1/chat/completions", json=body, headers=once)
            running = asyncio.ensure_future(client.send(request, stream=True))
            if stream:
                answer = await running
            while not backend.seen:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            request_id = answer.headers["x-request-id"] if stream else None
            named = {"end_user": {"end_user": "ann"}, "request": {"request_id": request_id}}.get(whose, {})
            receipt = await client.post("/admin/v1/prompts/erase", json={"tenant": "acme"} | named, headers=admin)
            assert receipt.status_code == 200, receipt.text
            erased.set()
            answer = await running
            assert "Par" in (await answer.aread()).decode()
            request_id = answer.headers["x-request-id"]

            later = await client.post("/v1/chat/completions", json=ASK | {"seed": 7})
            params = {"tenant": "acme"}
            while True:
                path = f"/admin/v1/prompts/{later.headers['x-request-id']}"
                if (await client.get(path, params=params, headers=admin)).status_code == 200:
                    break  # what was ended before it would be there by now
                await asyncio.sleep(0.02)
            gone = await client.get(f"/admin/v1/prompts/{request_id}", params=params, headers=admin)
            assert gone.status_code == 404
            again = await client.post("/v1/chat/completions", json=body, headers=once)
            assert "idempotent-replayed" not in again.headers
            assert again.headers["x-penstock-cache"] in ("miss", "unavailable")
