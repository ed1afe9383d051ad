"""What the SDKs are tried against: a gateway before our worker, and one before a stand-in of each brand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

import anthropic
import httpx
import openai
from sqlalchemy import insert

from gateway.db.engine import create_engine
from gateway.db.tables import backends, pools, prices, routes
from gateway.settings import Settings
from tests.gateway.conftest import Gateway, running_gateway
from tests.standins.anthropic import Anthropic
from tests.standins.base import StandIn
from tests.standins.google import Google
from tests.standins.llamacpp import LlamaCpp, LlamaCppOfOld
from tests.standins.ollama import Ollama
from tests.standins.openai_hosted import OpenAIHosted
from tests.standins.sglang import SGLang
from tests.standins.trtllm import TensorRTLLM
from tests.standins.vllm import VLLM, VLLMOfOld

STANDINS: Final[dict[str, type[StandIn]]] = {
    "vllm": VLLM,
    "vllm_of_old": VLLMOfOld,
    "sglang": SGLang,
    "trtllm": TensorRTLLM,
    "ollama": Ollama,
    "llamacpp": LlamaCpp,
    "llamacpp_of_old": LlamaCppOfOld,
    "openai": OpenAIHosted,
    "google": Google,
    "anthropic": Anthropic,
}
BACKEND_MODEL: Final = "theirs"
"""By which backends know the model; clients call it by its route's name."""
INPUT, CACHED, OUTPUT = 1000, 100, 2000
"""Prices in nano-USD a token."""


@dataclass(frozen=True)
class Declared:
    """A route with a pool, a backend and a price of its own, all by one name."""

    name: str
    brand: str
    url: str
    first_byte_timeout_s: float | None = None
    idle_timeout_s: float | None = None


async def declare(database_url: str, declared: list[Declared]) -> None:
    """All at once, before a gateway starts: so many through the admin API would take long."""
    engine = create_engine(database_url, pool_size=1)
    since = datetime(2026, 1, 1, tzinfo=UTC)
    caps = {"context_length": 1000, "default_output_tokens": 50, "max_output_tokens": 500, "timeout_s": 30.0}
    rates = {"input_usd_per_mtok": 1, "cached_input_usd_per_mtok": "0.1", "output_usd_per_mtok": 2}
    async with engine.begin() as connection:
        await connection.execute(insert(pools).values([{"name": each.name} for each in declared]))
        await connection.execute(
            insert(routes).values(
                [{"name": each.name, "pool": each.name, "backend_model": BACKEND_MODEL} | caps for each in declared]
            )
        )
        await connection.execute(
            insert(prices).values(
                [{"id": uuid4(), "route": each.name, "effective_from": since} | rates for each in declared]
            )
        )
        await connection.execute(
            insert(backends).values(
                [
                    {
                        "name": each.name,
                        "pool": each.name,
                        "brand": each.brand,
                        "base_url": each.url,
                        "context_length": 1000,
                        "first_byte_timeout_s": each.first_byte_timeout_s,
                        "idle_timeout_s": each.idle_timeout_s,
                    }
                    for each in declared
                ]
            )
        )
    await engine.dispose()


@dataclass(frozen=True)
class Clients:
    """The official SDKs before one gateway."""

    blocking_openai: openai.OpenAI
    openai: openai.AsyncOpenAI
    blocking_anthropic: anthropic.Anthropic
    anthropic: anthropic.AsyncAnthropic


@asynccontextmanager
async def clients_of(url: str, key: str) -> AsyncIterator[Clients]:
    ours: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": key, "max_retries": 0, "timeout": 30}
    theirs: dict[str, Any] = ours | {"base_url": url}
    with openai.OpenAI(**ours) as blocking, anthropic.Anthropic(**theirs) as blocking_too:
        async with openai.AsyncOpenAI(**ours) as awaited, anthropic.AsyncAnthropic(**theirs) as awaited_too:
            yield Clients(blocking, awaited, blocking_too, awaited_too)


def http_of(gateway: Gateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=gateway.url, headers={"authorization": f"Bearer {gateway.key}"}, timeout=20, verify=False
    )


class Way:
    """The blocking SDK, or the awaited one: both are asked alike."""

    def __init__(self, clients: Clients, *, blocking: bool) -> None:
        self.blocking = blocking
        self.openai: Any = clients.blocking_openai if blocking else clients.openai
        self.anthropic: Any = clients.blocking_anthropic if blocking else clients.anthropic

    async def get(self, method: Callable[..., Any], *arguments: Any, **fields: Any) -> Any:
        """What the call returns."""
        if self.blocking:
            return await asyncio.to_thread(method, *arguments, **fields)
        return await method(*arguments, **fields)

    async def listed(self, method: Callable[..., Any], **fields: Any) -> list[Any]:
        """The items of what the call returns: events of a stream, or a page's entries."""
        if self.blocking:
            return await asyncio.to_thread(lambda: list(method(**fields)))
        found = method(**fields)
        return [each async for each in (await found if isinstance(found, Awaitable) else found)]

    async def helped(self, method: Callable[..., Any], final: str, **fields: Any) -> tuple[list[Any], Any]:
        """The events of the SDK's helper for streams, and what it makes of them."""

        def block() -> tuple[list[Any], Any]:
            with method(**fields) as stream:
                return list(stream), getattr(stream, final)()

        if self.blocking:
            return await asyncio.to_thread(block)
        async with method(**fields) as stream:
            return [event async for event in stream], await getattr(stream, final)()


@dataclass(frozen=True)
class Target:
    """A model behind a gateway."""

    model: str
    clients: Clients
    standin: StandIn | None = None
    """None: it is our worker."""
    brand: str = "worker"


@dataclass
class House:
    """One gateway before all the stand-ins."""

    gateway: Gateway
    clients: Clients
    http: httpx.AsyncClient
    """Bears the tenant's key."""
    standins: dict[str, StandIn] = field(default_factory=dict)

    def target(self, name: str) -> Target:
        return Target(name, self.clients, self.standins[name], name)


@asynccontextmanager
async def house(settings: Settings) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        standins = {name: await stack.enter_async_context(kind()) for name, kind in STANDINS.items()}
        await declare(settings.database_url, [Declared(name, each.brand, each.url) for name, each in standins.items()])
        gateway = await stack.enter_async_context(running_gateway(settings))
        clients = await stack.enter_async_context(clients_of(gateway.url, gateway.key))
        yield House(gateway, clients, await stack.enter_async_context(http_of(gateway)), standins)
