from __future__ import annotations

import asyncio
import gc
from typing import Any

import httpx
import pytest

from gateway.answer import Answer
from gateway.backends.relay import Exchange
from gateway.cache.found import Miss
from gateway.cached_answer import CachedAnswer, SharedAnswer
from gateway.http.client import Client
from gateway.http.inference import Inference
from gateway.policies.answer_cache import CachePolicy
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.recording import Recording
from gateway.tenants.specs import TenantChange
from tests.gateway.tenants.support import ACTOR

KINDS = {Answer, CachedAnswer, Client, Exchange, Inference, Miss, Recording, SharedAnswer}


def alive() -> list[object]:
    # By type alone: some objects of other modules warn whoever asks them for anything.
    return [one for one in gc.get_objects() if type(one) in KINDS]


@pytest.mark.parametrize("remembered", [False, True])
async def test_answers_leave_nothing_to_the_garbage_collector(gateway: Any, upstream: Any, remembered: bool) -> None:
    """It runs seldom, so that what lies in reference cycles would stay a while, with all that hangs on it."""

    async def answers(c: Any) -> None:
        if not c.body["stream"]:
            await c.whole()
            return
        await c.begin()
        await c.token("Par", 1)
        await c.done()

    await gateway.register(await upstream(answers))
    if remembered:
        cache = CachePolicy(mode="exact", single_flight=True)
        both = TenantChange(answer_cache=cache, prompt_log=PromptLogPolicy(level="full"))
        await gateway.directory.update_tenant(ACTOR, "acme", both)
    ask = {"model": "m", "messages": [{"role": "user", "content": "?"}], "temperature": 0}
    gc.collect()
    before = alive()  # kept, so that nothing new can take the place of one of them
    gc.disable()
    try:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {gateway.key}"}, timeout=20) as client:
            for streamed in (False, True, False, True):
                answer = await client.post(f"{gateway.url}/v1/chat/completions", json=ask | {"stream": streamed})
                assert answer.status_code == 200
            url, other = f"{gateway.url}/v1/chat/completions", ask | {"stream": False, "top_k": 1}
            at_once = await asyncio.gather(*(client.post(url, json=other) for _ in range(2)))
            assert {answer.status_code for answer in at_once} == {200}
            async with asyncio.timeout(10):
                while len(alive()) > len(before):  # noqa: ASYNC110 - what is waited for has no event
                    await asyncio.sleep(0.05)
    finally:
        gc.enable()
