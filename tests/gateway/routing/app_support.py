"""A gateway before declared backends that a test scripts; what they are probed with is answered for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import httpx

from gateway.backends.brands import BRANDS
from gateway.routing.route import Target, new_route
from gateway.tenants.backend_changes import BackendChanges
from gateway.tenants.backend_specs import BackendSpec
from tests.gateway.conftest import Conversation, Gateway, Upstream, UpstreamFactory, chunk_event, whole_event
from tests.gateway.tenants.support import ACTOR

Script = Callable[[Conversation], Awaitable[None]]


def asked(server: Upstream, model: str | None = None) -> int:
    """Requests for inference that it got, of that model or of any."""
    found = [conversation for conversation in server.seen if conversation.head.startswith("POST")]
    return len(found) if model is None else sum(conversation.body["model"] == model for conversation in found)


async def answer(c: Conversation) -> None:
    """As ``generic`` servers do: a JSON body, or a stream of events."""
    if not c.body.get("stream"):
        await c.status(200, whole_event())
        return
    await c.begin()
    await c.event(chunk_event("Paris", finish="stop"))
    await c.done()


def refuse(status: int, *, more: str = "", code: str | None = None) -> Script:
    async def script(c: Conversation) -> None:
        body = b'{"error":{"message":"no","type":"t","param":null,"code":%s}}' % (
            b"null" if code is None else b'"%b"' % code.encode()
        )
        await c.status(status, body, more=more)

    return script


def probed(script: Script) -> Script:
    """``script`` for requests, and a sign of life for probes."""

    async def script_or_probe(c: Conversation) -> None:
        await (script(c) if c.head.startswith("POST") else c.status(200, b"{}"))

    return script_or_probe


async def never(c: Conversation) -> None:
    """It takes the request and says nothing."""
    await c.wait_closed_by_peer(within_s=60)


@dataclass
class Site:
    gateway: Gateway
    upstream: UpstreamFactory
    client: httpx.AsyncClient

    async def serve(self, script: Script) -> Upstream:
        return await self.upstream(probed(script))

    async def pool(self, name: str) -> None:
        await self.gateway.catalog.create_pool(ACTOR, name)

    async def declare(self, name: str, pool: str, url: str, **more: Any) -> None:
        """A backend; the gateway knows it when ``known`` has returned."""
        spec = BackendSpec(name=name, pool=pool, brand="generic", base_url=url, context_length=1000, **more)
        await BackendChanges(self.gateway.engine, None, BRANDS).create_backend(ACTOR, spec)

    async def known(self, pool: str) -> None:
        """Let the gateway know all backends: it reads them when it changes one itself, here one that is disabled."""
        body = {"name": "disabled", "pool": pool, "brand": "generic", "base_url": "http://h", "enabled": False}
        headers = {"authorization": f"Bearer {self.gateway.admin_key}"}
        made = await self.client.post("/admin/v1/backends", json=body, headers=headers)
        assert made.status_code == 201, made.text

    async def route(self, name: str, *pools: str, timeout_s: float = 30.0) -> None:
        """Each pool a tier of its own; a million tokens cost 1 and 2 USD."""
        more = [Target(pool, name, priority=number) for number, pool in enumerate(pools[1:], 1)]
        await self.gateway.create_route(
            new_route(name, pool=pools[0], context_length=1000, timeout_s=timeout_s, more_targets=more)
        )
        await self.gateway.set_price(name, "1", "2", effective_from=datetime(2026, 1, 1, tzinfo=UTC))

    async def ask(self, model: str, **more: Any) -> httpx.Response:
        return await self.client.post(
            "/v1/chat/completions",
            json={"model": model, "messages": [{"role": "user", "content": "Hi"}]} | more,
            headers={"authorization": f"Bearer {self.gateway.key}"},
        )

    async def row(self, response: httpx.Response) -> Any:
        """The usage row of that request, once it is there."""
        return (await self.rows([response]))[0]

    async def rows(self, responses: Sequence[httpx.Response]) -> list[Any]:
        ids = [UUID(response.headers["x-request-id"]) for response in responses]
        async with asyncio.timeout(10):
            while True:
                found = {row.request_id: row for row in await self.gateway._rows()}
                if all(id in found for id in ids):
                    return [found[id] for id in ids]
                await asyncio.sleep(0.02)
