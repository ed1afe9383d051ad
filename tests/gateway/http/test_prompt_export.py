"""An export through a gateway: whoever leaves in the middle of one does not keep the tenant from another."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

from gateway.policies.prompt_log import PromptLogPolicy
from gateway.redis_url import ClusterAddress, parse_redis_url
from gateway.tenants.specs import TenantChange
from tests.gateway.conftest import Conversation, whole_event
from tests.gateway.tenants.support import ACTOR


async def test_who_leaves_an_export_ends_its_turn(start_gateway: Any, upstream: Any, redis_url: str) -> None:
    if isinstance(parse_redis_url(redis_url), ClusterAddress):
        pytest.skip("the prompt log wants one server, not a cluster")

    async def long(c: Conversation) -> None:
        await c.whole(whole_event("words " * 100_000))

    async with start_gateway() as gateway:
        await gateway.register(await upstream(long))
        await gateway.directory.update_tenant(ACTOR, "acme", TenantChange(prompt_log=PromptLogPolicy(level="full")))
        key, _ = await gateway.directory.create_key(ACTOR, "acme", "all", scopes={"inference", "prompts:read"})
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.url + "/v1", headers=headers, timeout=20) as client:
            for _ in range(20):
                said = await client.post(
                    "/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": "Long?"}]}
                )
                assert said.status_code == 200
            async with asyncio.timeout(10):
                while len((await client.get("/prompts")).json()["data"]) < 20:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=4096)
            writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.write(f"GET /v1/prompts/export HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n".encode())
            assert b"200" in await reader.readline()
            await asyncio.sleep(0.3)
            assert (await client.get("/prompts/export")).status_code == 429
            writer.transport.abort()
            async with asyncio.timeout(10):
                while (again := await client.get("/prompts/export")).status_code == 429:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert len(again.text.splitlines()) == 20
