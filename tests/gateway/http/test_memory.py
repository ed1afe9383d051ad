"""The answer cache and the prompt log, through the doors: what a client sees, and what its rows say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from gateway.policies.answer_cache import CachePolicy
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.tenants.specs import TenantChange
from tests.gateway.conftest import chunk_event, whole_event
from tests.gateway.tenants.support import ACTOR

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}
CACHE = CachePolicy(mode="exact")
MISSES = ("miss", "unavailable")
"""A busy machine may take longer than a look-up may."""


async def whole(c: Any) -> None:
    await c.whole(whole_event("Paris"))


async def streamed(c: Any) -> None:
    await c.begin()
    for number, text in enumerate(("Par", "is"), 1):
        await c.token(text, number)
    await c.event(chunk_event("", finish="stop"))
    await c.meter(9, 3)
    await c.done()


async def either(c: Any) -> None:
    await (streamed if c.body.get("stream") else whole)(c)


async def change(gateway: Any, **values: Any) -> None:
    await gateway.directory.update_tenant(ACTOR, "acme", TenantChange(**values))
    await asyncio.sleep(0.05)


def client_of(gateway: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer {gateway.key}"}, timeout=20)


async def hit(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    """Asks until the answer is kept, which is soon after it was given."""
    async with asyncio.timeout(5):
        while True:
            answer = await client.post(PATH, json=ASK | body)
            assert answer.status_code == 200, answer.text
            if answer.headers["x-penstock-cache"] in ("exact", "semantic"):
                return answer
            await asyncio.sleep(0.05)


async def test_the_same_question_is_answered_by_what_was_kept(gateway: Any, upstream: Any) -> None:
    backend = await upstream(whole)
    await gateway.register(backend)
    await change(gateway, answer_cache=CACHE)
    async with client_of(gateway) as client:
        first = await client.post(PATH, json=ASK)
        assert first.headers["x-penstock-cache"] in MISSES
        again = await hit(client)
        assert again.json() == first.json()
        assert again.headers["x-penstock-cost-usd"] == "0.000000000"
        assert "x-penstock-backend" not in again.headers
        off = await client.post(PATH, json=ASK, headers={"x-penstock-cache": "off"})
        assert "x-penstock-cache" not in off.headers
        bad = await client.post(PATH, json=ASK, headers={"x-penstock-cache": "yes"})
        assert bad.status_code == 400
    rows = await gateway.rows(len(backend.seen) + 1)
    kept = [row for row in rows if row.status == "cache_hit"]
    paid = [row for row in rows if row.status == "ok"]
    assert len(kept) == 1
    assert (kept[0].cache, kept[0].charged_nano_usd, kept[0].cost_nano_usd, kept[0].attempts) == ("exact", 0, 0, 0)
    assert (kept[0].saved_nano_usd, kept[0].saved_tokens) == (paid[0].charged_nano_usd, 12)
    assert (kept[0].prompt_tokens, kept[0].completion_tokens) == (0, 0)


@pytest.mark.parametrize("first", [False, True])
async def test_streamed_and_whole_share_what_is_kept(gateway: Any, upstream: Any, first: bool) -> None:
    await gateway.register(await upstream(either))
    await change(gateway, answer_cache=CACHE)
    sdk = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0)

    async def ask(stream: bool) -> tuple[str, str]:
        if not stream:
            raw = await sdk.chat.completions.with_raw_response.create(**ASK)
            completion = raw.parse()
            assert completion.usage is not None
            assert completion.usage.total_tokens == 12
            return raw.headers["x-penstock-cache"], completion.choices[0].message.content or ""
        raw = await sdk.chat.completions.with_raw_response.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        )
        text, usages, roles = "", [], []
        async for chunk in raw.parse():
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                text += choice.delta.content or ""
                roles += [choice.delta.role] if choice.delta.role else []
        if raw.headers["x-penstock-cache"] == "exact":  # the backend's script knows nothing of either
            assert [usage.total_tokens for usage in usages] == [12]
            assert roles == ["assistant"]
        return raw.headers["x-penstock-cache"], text

    async with sdk:
        outcome, text = await ask(first)
        assert (outcome in MISSES, text) == (True, "Paris")
        async with asyncio.timeout(5):
            while (found := await ask(not first))[0] in MISSES:  # noqa: ASYNC110 - the cache tells no event
                await asyncio.sleep(0.05)
        assert found == ("exact", "Paris")
        async with asyncio.timeout(5):
            while (found := await ask(first))[0] in MISSES:  # noqa: ASYNC110 - the cache tells no event
                await asyncio.sleep(0.05)
        assert found == ("exact", "Paris")


async def test_identical_requests_at_the_same_time_share_one_answer(gateway: Any, upstream: Any) -> None:
    let_go = asyncio.Event()

    async def slow(c: Any) -> None:
        await let_go.wait()
        await c.whole(whole_event("Paris"))

    backend = await upstream(slow)
    await gateway.register(backend)
    await change(gateway, answer_cache=CachePolicy(mode="exact", single_flight=True))
    async with client_of(gateway) as client, asyncio.TaskGroup() as group:
        asked = [group.create_task(client.post(PATH, json=ASK)) for _ in range(4)]
        async with asyncio.timeout(5):
            while not backend.seen:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        let_go.set()
    assert [task.result().json()["choices"][0]["message"]["content"] for task in asked] == ["Paris"] * 4
    assert len(backend.seen) == 1
    rows = await gateway.rows(4)
    assert sorted(row.status for row in rows) == ["cache_hit"] * 3 + ["ok"]


async def test_one_that_follows_answers_by_itself_when_the_first_fails(gateway: Any, upstream: Any) -> None:
    async def broken(c: Any) -> None:
        await asyncio.sleep(0.3)
        await c.status(400, b'{"error": {"message": "no"}}')

    backend = await upstream(broken, whole)
    await gateway.register(backend)
    await change(gateway, answer_cache=CachePolicy(mode="exact", single_flight=True))
    async with client_of(gateway) as client:
        first = asyncio.ensure_future(client.post(PATH, json=ASK))
        async with asyncio.timeout(5):
            while not backend.seen:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        second = await client.post(PATH, json=ASK)
        assert (await first).status_code == 400
        assert second.status_code == 200
    assert sorted(row.status for row in await gateway.rows(2)) == ["failed", "ok"]


async def test_who_hangs_up_while_following_leaves_one_row(gateway: Any, upstream: Any) -> None:
    let_go = asyncio.Event()

    async def slow(c: Any) -> None:
        await let_go.wait()
        await c.whole(whole_event("Paris"))

    backend = await upstream(slow)
    await gateway.register(backend)
    await change(gateway, answer_cache=CachePolicy(mode="exact", single_flight=True))
    async with client_of(gateway) as client:
        first = asyncio.ensure_future(client.post(PATH, json=ASK))
        async with asyncio.timeout(5):
            while not backend.seen:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with pytest.raises(httpx.ReadTimeout):
            await client.post(PATH, json=ASK, timeout=0.3)
        assert [row.status for row in await gateway.rows(1)] == ["aborted"]
        let_go.set()
        assert (await first).status_code == 200
    rows = await gateway.rows(2)
    assert sorted(row.status for row in rows) == ["aborted", "ok"]
    assert len(backend.seen) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_said_is_logged_as_the_tenant_wants(gateway: Any, upstream: Any, stream: bool) -> None:
    await gateway.register(await upstream(streamed if stream else whole))
    await change(gateway, prompt_log=PromptLogPolicy(level="full", opt_out=True))
    async with client_of(gateway) as client:
        said = await client.post(PATH, json=ASK | {"stream": stream})
        assert said.status_code == 200
        silent = await client.post(PATH, json=ASK | {"stream": stream}, headers={"x-penstock-log": "off"})
        assert silent.status_code == 200
        admin = {"authorization": f"Bearer {gateway.admin_key}"}
        async with asyncio.timeout(5):
            while True:
                listed = await client.get("/admin/v1/prompts", params={"tenant": "acme"}, headers=admin)
                assert listed.status_code == 200, listed.text
                if entries := listed.json()["data"]:
                    break
                await asyncio.sleep(0.05)
        assert len(entries) == 1
        request_id = said.headers["x-request-id"]
        entry = (await client.get(f"/admin/v1/prompts/{request_id}", params={"tenant": "acme"}, headers=admin)).json()
        assert entry["request"]["messages"] == ASK["messages"]
        assert entry["response"]["choices"][0]["message"]["content"] == "Paris"
        assert json.dumps(entry).count(gateway.key) == 0
