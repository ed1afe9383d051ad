"""What a client hears beside plain tokens: errors by kind, merged outputs, cache events; and sleep and wake."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.engine.scripted_peer import EVENTS
from worker.engine.client import (
    ControlRefused,
    EngineClient,
    EngineDead,
    EngineStopped,
    GrammarFailed,
    QueueTimeout,
    RequestRejected,
)
from worker.engine.config import EngineConfig
from worker.engine.generation import merge
from worker.engine.messages import EngineOutput, EngineRequest
from worker.engine.plan import SamplingParams, TokenLogprobs
from worker.protocol.kv_events import KVEvent
from worker.server.idle_sleep import sleep_when_idle

PEER = [sys.executable, str(Path(__file__).with_name("scripted_peer.py"))]
Start = Callable[..., Awaitable[EngineClient]]


def request(name: str) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=[1, 2], sampling=SamplingParams(), max_tokens=9, stop_token_ids=[]
    )


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def starter(**script: Any) -> EngineClient:
            config = EngineConfig(model_path=json.dumps(script))
            return await stack.enter_async_context(await EngineClient.start(config, command=PEER))

        yield starter


async def outputs(client: EngineClient, name: str, **more: bool) -> list[EngineOutput]:
    async with client.generate(request(name), **more) as generation:
        return [output async for output in generation]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("rejected", RequestRejected),
        ("queue_timeout", QueueTimeout),
        ("grammar", GrammarFailed),
        ("asleep", ControlRefused),
        (None, RequestRejected),
    ],
)
async def test_an_error_is_raised_by_its_kind_after_the_tokens_before_it(
    start: Start, kind: str | None, raised: type[Exception]
) -> None:
    end = {"token_ids": [], "finish_reason": "error", "error": "so it is", "error_kind": kind}
    client = await start(outputs={"a": [{"token_ids": [7]}, end]})
    generation = client.generate(request("a"))
    await until(lambda: client.open_requests == 0)
    assert (await anext(generation)).token_ids == [7]
    with pytest.raises(raised, match="so it is") as fault:
        await anext(generation)
    assert type(fault.value) is raised
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_what_a_slow_reader_left_is_merged_without_loss(start: Start) -> None:
    said: list[dict[str, Any]] = [
        {"token_ids": [], "prefilled": 1, "cached_tokens": 16, "queued_us": 70, "compute_us": 5},
        {"token_ids": [], "prefilled": 2, "compute_us": 5, "prompt_logprobs": [[2, -0.5, 1, [2], [-0.5]]]},
        {"token_ids": [7], "compute_us": 3, "logprobs": [[7, -1.0, 2, [8, 7], [-0.9, -1.0]]]},
        {"token_ids": [0], "compute_us": 2, "logprobs": [[0, -2.0, 3, [8], [-0.1]]], "finish_reason": "stop"},
    ]
    said[-1]["stop_token_id"] = 0
    client = await start(outputs={"a": said})
    generation = client.generate(request("a"), progress=True)
    await until(lambda: client.open_requests == 0)
    output = await anext(generation)
    assert output == EngineOutput(
        request_id="a",
        token_ids=[7, 0],
        finish_reason="stop",
        prefilled=None,  # with the first token, all is computed
        stop_token_id=0,
        cached_tokens=16,
        queued_us=70,
        compute_us=15,
        logprobs=[TokenLogprobs(7, -1.0, 2, [8, 7], [-0.9, -1.0]), TokenLogprobs(0, -2.0, 3, [8], [-0.1])],
        prompt_logprobs=[TokenLogprobs(2, -0.5, 1, [2], [-0.5])],
    )
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


def _entries(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(at, -float(at), at + 1, [at], [-float(at)]) for at in ids]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=8),
    with_logprobs=st.booleans(),
    embeds=st.booleans(),
)
def test_merged_outputs_tell_what_all_of_them_told(
    sizes: list[tuple[int, int, int]], with_logprobs: bool, embeds: bool
) -> None:
    pieces: list[EngineOutput] = []
    tokens: list[int] = []
    prompt: list[int] = []
    for at, (count, prompt_count, compute_us) in enumerate(sizes):
        new = list(range(len(tokens), len(tokens) + count))
        new_prompt = [] if tokens or new else list(range(len(prompt), len(prompt) + prompt_count))
        tokens += new
        prompt += new_prompt
        last = at == len(sizes) - 1
        pieces.append(
            EngineOutput(
                "a",
                new,
                "length" if last else None,
                prefilled=None if tokens else len(prompt),
                cached_tokens=3 if at == 0 else None,
                queued_us=0 if at == 0 else None,
                compute_us=compute_us,
                logprobs=_entries(new) if with_logprobs and new else None,
                prompt_logprobs=_entries(new_prompt) if new_prompt else None,
                embedding=[0.5] if embeds and last else None,
            )
        )
    merged = pieces[0]
    for piece in pieces[1:]:
        merged = merge(merged, piece)
    assert merged.token_ids == tokens
    assert merged.finish_reason == "length"
    assert (merged.cached_tokens, merged.queued_us) == (3, 0)
    assert merged.compute_us == sum(compute_us for _, _, compute_us in sizes)
    assert (merged.logprobs or []) == (_entries(tokens) if with_logprobs else [])
    assert (merged.prompt_logprobs or []) == _entries(prompt)
    assert merged.prefilled == (None if tokens else len(prompt))
    assert merged.embedding == ([0.5] if embeds else None)


async def test_cache_events_reach_whoever_listens(start: Start) -> None:
    client = await start()
    await client.reset_cache()  # nobody listens: they are dropped
    heard: list[KVEvent] = []
    client.on_kv_events = heard.extend
    await client.reset_cache()
    assert heard == EVENTS


async def test_a_refused_control_says_why_and_changes_nothing(start: Start) -> None:
    client = await start(refuse={"sleep": "requests are open", "reset_cache": "not now"})
    with pytest.raises(ControlRefused, match="requests are open"):
        await client.sleep()
    assert client.sleep_level == 0
    with pytest.raises(ControlRefused, match="not now"):
        await client.reset_cache()
    assert [output.token_ids for output in await outputs(client, "a")] == [[5]]
    assert client.stats.preemptions == client.stats.steps == 0


async def test_a_second_sleep_that_is_refused_leaves_the_first(start: Start) -> None:
    client = await start()
    held = client.generate(request("open"))
    with pytest.raises(ControlRefused):
        await client.sleep(1)
    assert client.sleep_level == 0
    await held.aclose()
    await client.sleep(2)
    assert client.sleep_level == 2
    await client.ensure_awake()
    assert client.sleep_level == 0


async def test_sleep_and_wake(start: Start) -> None:
    client = await start()
    await client.ensure_awake()  # nothing to do, nothing sent
    await client.sleep(1)
    assert (client.sleep_level, client.stats.preemptions, client.stats.steps) == (1, 1, 0)
    await client.ensure_awake()
    assert (client.sleep_level, client.stats.preemptions, client.stats.steps) == (0, 1, 1)


async def test_those_who_need_it_awake_share_one_wake(start: Start) -> None:
    client = await start(control_s=0.05)
    await client.sleep()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(client.ensure_awake())
        impatient = tasks.create_task(client.ensure_awake())
        await asyncio.sleep(0)
        impatient.cancel()  # the wake goes on for the others
    assert (client.sleep_level, client.stats.steps) == (0, 1)
    assert client._next_control == 2


async def test_a_request_that_comes_while_the_engine_falls_asleep_wakes_it(start: Start) -> None:
    client = await start(control_s=0.05)
    sleeping = asyncio.ensure_future(client.sleep())
    await asyncio.sleep(0)
    assert client.sleep_level == 1
    await client.ensure_awake()
    assert sleeping.done()
    assert (await outputs(client, "a"))[0].token_ids == [5]
    assert (client.stats.preemptions, client.stats.steps) == (1, 1)


async def test_a_request_is_never_before_the_wake_even_when_nobody_waited_for_it(start: Start) -> None:
    client = await start(control_s=0.02)
    sleeping = asyncio.ensure_future(client.sleep())
    await asyncio.sleep(0)
    generations = [client.generate(request(f"r{at}")) for at in range(3)]
    assert client.idle_s == 0
    for generation in generations:
        assert [output.token_ids async for output in generation] == [[5]]
    await sleeping
    await until(lambda: client.sleep_level == 0)
    assert client._next_control == 2


async def test_a_sleep_asked_for_while_it_wakes_is_undone_by_a_wake_of_its_own(start: Start) -> None:
    client = await start(control_s=0.02)
    await client.sleep(1)
    waking = asyncio.ensure_future(client.ensure_awake())
    await asyncio.sleep(0)
    again = asyncio.ensure_future(client.sleep(2))
    await asyncio.sleep(0)
    generation = client.generate(request("a"))
    assert [output.token_ids async for output in generation] == [[5]]
    await asyncio.gather(waking, again)
    assert (client.sleep_level, client.stats.preemptions, client.stats.steps) == (0, 2, 2)


async def test_whoever_asked_for_sleep_may_leave(start: Start) -> None:
    client = await start(control_s=0.05)
    sleeping = asyncio.ensure_future(client.sleep())
    await asyncio.sleep(0)
    sleeping.cancel()
    await until(lambda: client.stats.preemptions == 1)
    await client.ensure_awake()
    assert client.sleep_level == 0
    held = client.generate(request("open"))
    refused = asyncio.ensure_future(client.sleep())
    await asyncio.sleep(0)
    refused.cancel()
    await until(lambda: client.sleep_level == 0)  # it was refused, though nobody heard
    await held.aclose()


async def test_an_engine_that_can_not_be_woken_says_so_to_everybody(start: Start) -> None:
    client = await start(refuse={"wake": "no memory is left"})
    await client.sleep()
    for result in await asyncio.gather(*(client.ensure_awake() for _ in range(3)), return_exceptions=True):
        assert isinstance(result, ControlRefused)
        assert str(result) == "no memory is left"
    assert client.sleep_level == 1
    with pytest.raises(RequestRejected, match="slept"):
        await outputs(client, "a")


async def test_the_end_of_the_engine_ends_control_too(start: Start) -> None:
    client = await start(control_s=30)
    waiting = [asyncio.ensure_future(client.sleep()), asyncio.ensure_future(client.ensure_awake())]
    await asyncio.sleep(0)
    waiting.append(asyncio.ensure_future(client.ensure_awake()))
    await asyncio.sleep(0)
    assert client._process is not None
    client._process.kill()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert type(result) is EngineDead
    for late in (client.sleep, client.reset_cache, client.ensure_awake):
        with pytest.raises(EngineDead):
            await late()


async def test_closing_ends_control_too(start: Start) -> None:
    client = await start(control_s=30)
    sleeping = asyncio.ensure_future(client.sleep())
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(EngineStopped):
        await sleeping


async def test_an_idle_engine_is_put_to_sleep_and_wakes_on_demand_again_and_again(start: Start) -> None:
    client = await start()
    sleeper = asyncio.ensure_future(sleep_when_idle(client, 0.05))
    for round in range(1, 4):
        await until(lambda round=round: client.stats.preemptions == round)
        await client.ensure_awake()
        assert (await outputs(client, f"r{round}"))[0].token_ids == [5]
        assert client.stats.steps == round
    sleeper.cancel()


async def test_an_engine_with_open_requests_is_not_idle(start: Start) -> None:
    client = await start()
    held = client.generate(request("open"))
    sleeper = asyncio.ensure_future(sleep_when_idle(client, 0.01))
    await asyncio.sleep(0.1)
    assert (client.idle_s, client._next_control) == (0, 0)
    await held.aclose()
    await until(lambda: client.sleep_level == 1)
    sleeper.cancel()


async def test_no_request_is_lost_between_falling_asleep_and_waking(start: Start) -> None:
    """Requests at every moment of a sleeper that sleeps at once: each gets its token."""
    client = await start(control_s=0.001)
    sleeper = asyncio.ensure_future(sleep_when_idle(client, 1e-6))

    async def one(at: int) -> None:
        await asyncio.sleep(at * 0.0007)
        await client.ensure_awake()
        assert (await outputs(client, f"r{at}"))[0].token_ids == [5]

    await asyncio.gather(*(one(at) for at in range(200)))
    sleeper.cancel()
    assert client.stats.steps > 0
    assert client.stats.preemptions > 0
