"""The engine process as it is, with the toy for a model: control, cache events, and what it does while it waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.worker.engine.asking import request, tokens_of
from tests.worker.engine.toy_runner import text_alone
from worker.engine.client import ControlRefused, EngineClient
from worker.engine.config import EngineConfig
from worker.engine.messages import EngineOutput, EngineRequest
from worker.protocol.kv_events import BlockStored, CacheCleared, KVEvent

TOY = [sys.executable, str(Path(__file__).with_name("toy_runner.py"))]
Start = Callable[..., Awaitable[EngineClient]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def starter(toy: dict[str, Any] | None = None, **config: Any) -> EngineClient:
            made = EngineConfig(model_path=json.dumps({"block_size": 4} | (toy or {})), check_every_step=True, **config)
            return await stack.enter_async_context(await EngineClient.start(made, command=TOY))

        yield starter


async def outputs_of(client: EngineClient, asked: EngineRequest) -> list[EngineOutput]:
    return [output async for output in client.generate(asked)]


@pytest.mark.parametrize("overlap", [False, True])
async def test_sleep_wake_and_reset_reach_the_engine(start: Start, overlap: bool) -> None:
    client = await start(kv_events=True, overlap=overlap)
    events: list[KVEvent] = []
    client.on_kv_events = events.extend
    asked = request("a", 12, 4)
    wanted = text_alone(asked.prompt_token_ids, asked.sampling, 4)[0]
    outputs = await outputs_of(client, asked)
    assert tokens_of(outputs) == wanted
    assert sum(len(event.names) for event in events if isinstance(event, BlockStored)) == 3
    generation = client.generate(request("b", 12, 200))
    first = await anext(generation)
    assert first.cached_tokens == 8
    with pytest.raises(ControlRefused, match="open"):
        await client.sleep()
    await generation.aclose()
    while client.open_requests:  # noqa: ASYNC110 - what is waited for happens in another process
        await asyncio.sleep(0.005)
    await client.sleep(2)
    assert client.stats.sleeping == 2
    assert client.stats.kv_usage == 0
    assert events[-1] == CacheCleared()
    await client.ensure_awake()
    assert client.stats.sleeping == 0
    outputs = await outputs_of(client, asked)
    assert (outputs[0].cached_tokens, tokens_of(outputs)) == (0, wanted)
    await client.reset_cache()
    assert client.stats.cached_blocks == 0
    assert (await outputs_of(client, asked))[0].cached_tokens == 0


async def test_a_transfer_that_takes_long_is_awaited_without_spinning(start: Start) -> None:
    client = await start({"num_blocks": 16, "host_blocks": 100, "transfer_polls": 100, "max_running": 2}, max_running=2)
    for index in range(4):
        await outputs_of(client, request(f"r{index}", 32, 4, seed=index))
    assert client._process is not None
    process = psutil.Process(client._process.pid)
    before = sum(process.cpu_times()[:2])
    await asyncio.sleep(0.5)  # the last of the copies to the host are under way
    assert sum(process.cpu_times()[:2]) - before < 0.2
    asked = request("again", 32, 4)
    outputs = await outputs_of(client, asked)
    assert outputs[0].cached_tokens == client.stats.host_hits > 0
    assert tokens_of(outputs) == text_alone(asked.prompt_token_ids, asked.sampling, 4)[0]


async def test_times_run_out_though_nothing_can_run(start: Start) -> None:
    """A request waits for KV that takes for ever."""
    client = await start({"num_blocks": 16, "host_blocks": 100, "transfer_polls": 5, "stuck_loads": True})
    for index in range(4):
        await outputs_of(client, request(f"r{index}", 32, 4, seed=index))
    await asyncio.sleep(0.2)  # until copied
    (last,) = await outputs_of(client, request("late", 32, 4, deadline_s=0.2))
    assert (last.token_ids, last.finish_reason) == ([], "length")
    assert client.stats.waiting == 0
