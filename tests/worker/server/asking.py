"""How these tests ask a worker, and read what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from openai import AsyncOpenAI

from tests.worker.server.conftest import FLEET_TOKEN, MODEL, ScriptedServer
from worker.protocol.errors import ErrorBody
from worker.protocol.sse import Comment, Event, Framer

TEXT = "Hello, wörld! 👩‍🚀"
USER = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": USER}
FLEET = {"authorization": f"Bearer {FLEET_TOKEN}"}


def sdk(server: ScriptedServer) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key="anything", max_retries=0, timeout=20)


def http(server: ScriptedServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=20)


async def until(condition: Any, limit_s: float = 10.0) -> float:
    """Wait for ``condition``; how long it took, in seconds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 (what is waited for lies outside the loop)
            await asyncio.sleep(0.005)
    return loop.time() - began


async def collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


def frames(body: bytes) -> list[Event | Comment]:
    return Framer().feed(body)


def error_of(body: bytes) -> dict[str, Any]:
    """The error of an answer in OpenAI's shape: all four fields, and nothing else."""
    ((name, fields),) = json.loads(body).items()
    assert name == "error"
    assert set(fields) == set(ErrorBody.__struct_fields__)
    return dict(fields)
