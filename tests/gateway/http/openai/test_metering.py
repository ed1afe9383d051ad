"""Who is metered and for what, over real sockets: end users, tags, caps of a key, counted prompts, refusals' words."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from gateway.routing.route import Route
from gateway.secret_key import SecretKey
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.specs import LimitSpec
from tests.gateway.tenants.support import ACTOR, budget, requests_per_minute
from worker.protocol.fleet import WorkerRecord
from worker.protocol.token_counting import PATH as COUNTING_PATH
from worker.protocol.token_counting import ChatForm, TokenCounting, Turn, encode_counting
from worker.protocol.usage import MeterReading, encode_meter

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@contextlib.asynccontextmanager
async def client_of(gateway: Any, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key or gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client:
        yield client


def hashed(gateway: Any, row: Any, name: str) -> str:
    return end_user_hash(SecretKey(gateway.settings.secret_key), row.tenant_id, name)


async def whole(c: Any) -> None:
    await c.whole()


async def test_end_user_and_tags_are_in_the_row_and_the_name_nowhere(gateway: Any, upstream: Any) -> None:
    await gateway.register(await upstream(whole))
    asked = [
        ({"user": "ada@example.com"}, {}),
        ({"user": "x", "safety_identifier": "ada@example.com"}, {"x-penstock-tags": "team=blue,beta"}),
        ({"user": "x"}, {"x-penstock-end-user": "Zoë".encode()}),
        ({"user": "x"}, {"x-penstock-end-user": "Zo\xeb".encode("latin-1")}),
        ({}, {}),
    ]
    async with client_of(gateway) as client:
        for fields, headers in asked:
            assert (await client.post(PATH, json=ASK | fields, headers=headers)).status_code == 200
        bad = await client.post(PATH, json=ASK, headers={"x-penstock-tags": "x" * 65})
        assert bad.status_code == 400
        assert "x-penstock-tags" in bad.json()["error"]["message"]
    rows = await gateway.rows(5)
    ada, zoe = hashed(gateway, rows[0], "ada@example.com"), hashed(gateway, rows[0], "Zoë")
    assert [row.end_user for row in rows] == [ada, ada, zoe, zoe, None]
    assert list(rows[1].tags) == ["beta", "team=blue"]
    assert list(rows[0].tags) == []
    assert not any("ada@" in str(row) for row in rows)
    for row in rows:
        assert 0 <= row.queue_ms <= row.first_token_ms <= row.total_ms


async def test_each_end_user_has_limits_of_its_own(start_gateway: Any, upstream: Any) -> None:
    each = LimitSpec(subject="end_user", metric="requests", window="hour", amount=1)
    async with start_gateway(limits=[each]) as gateway, client_of(gateway) as client:
        await gateway.register(await upstream(whole))
        told = [(await client.post(PATH, json=ASK | {"user": user})) for user in ("a", "b", "a")]
        assert [answer.status_code for answer in told] == [200, 200, 429]
        error = told[2].json()["error"]
        assert error["message"].startswith("Over the limit of 1 requests per hour of this end user.")
        assert (await client.post(PATH, json=ASK)).status_code == 200


async def test_what_a_worker_meters_is_in_the_row(gateway: Any, upstream: Any) -> None:
    async def meters(c: Any) -> None:
        await c.begin()
        await c.send_piece(encode_meter(MeterReading(9, 3, cached_tokens=4, compute_us=12_345)))
        await c.event(json.dumps({"choices": [], "model": "m"}).encode())
        await c.done()

    async def reports(c: Any) -> None:
        usage = {
            "prompt_tokens": 9,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 2},
        }
        await c.begin()
        await c.event(json.dumps({"choices": [], "model": "m", "usage": usage}).encode())
        await c.done()

    await gateway.register(await upstream(meters, reports))
    async with client_of(gateway) as client:
        for _ in range(2):
            assert (await client.post(PATH, json=ASK)).status_code == 200
    metered, reported = await gateway.rows(2)
    assert (metered.prompt_tokens, metered.cached_tokens, metered.compute_us) == (9, 4, 12_345)
    assert (reported.prompt_tokens, reported.cached_tokens, reported.reasoning_tokens) == (9, 4, 2)
    assert reported.usage_source == "backend"


async def test_the_caps_of_a_key_hold(gateway: Any, upstream: Any) -> None:
    server = await upstream(whole)
    await gateway.register(server)
    short, _ = await gateway.directory.create_key(ACTOR, "acme", "short", max_output_tokens=20)
    narrow, _ = await gateway.directory.create_key(ACTOR, "acme", "narrow", max_context_tokens=100)
    async with client_of(gateway, short) as client:
        assert (await client.post(PATH, json=ASK)).status_code == 200
        assert server.seen[-1].body["max_tokens"] == 20
        answer = await client.post(PATH, json=ASK | {"max_tokens": 21})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
        assert "this API key" in answer.json()["error"]["message"]
    async with client_of(gateway, narrow) as client:
        # Nothing is known of the tokenizer, so that bytes count.
        answer = await client.post(PATH, json=ASK)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(server.seen) == 1


async def test_the_weight_of_a_tenant_reaches_the_worker(gateway: Any, upstream: Any) -> None:
    from gateway.tenants.specs import TenantSettings

    server = await upstream(whole)
    await gateway.register(server)
    await gateway.directory.create_tenant(ACTOR, "heavy", settings=TenantSettings(weight=2.5))
    key, _ = await gateway.directory.create_key(ACTOR, "heavy", "k")
    async with client_of(gateway, key) as client:
        assert (await client.post(PATH, json=ASK)).status_code == 200
    assert server.seen[0].headers["x-penstock-weight"] == "2.5"


COUNTING = TokenCounting(
    tokens=[bytes([byte]) for byte in range(256)],
    pattern=r"\S+|\s+",
    form=ChatForm(first={"user": Turn(3, "", "")}, later={"user": Turn(3, "", "")}, end_tokens=5),
    request_tokens=256,
    message_tokens=32,
    nested_tokens_per_byte=1,
)
"""Of a model that makes a token of each byte: a message "hi" is 10 tokens."""


async def test_a_prompt_is_counted_by_what_its_worker_tells(start_gateway: Any, upstream: Any) -> None:
    asked: list[str] = []

    async def answers(c: Any) -> None:
        if COUNTING_PATH in c.head:
            asked.append(c.headers["authorization"])
            await c.status(200, encode_counting(COUNTING), media_type="application/vnd.msgpack")
        else:
            await c.whole(prompt=10, completion=20)

    tokens = LimitSpec(metric="tokens", window="day", amount=1000)
    async with start_gateway(limits=[tokens]) as gateway, client_of(gateway) as client:
        await gateway.create_route(Route("counted", "pool", "m", 1000, 20, 500, 30.0, tokenizer="backend"))
        await gateway.set_price("counted", "1", "2")
        server = await upstream(answers)
        record = WorkerRecord(
            worker_id="w1", pool="pool", base_url=server.url, model="m", context_length=1000, model_fingerprint="f1"
        )
        await gateway.registry.register(record)
        gateway.registered.add("w1")
        await gateway._settle_view()
        ask = ASK | {"model": "counted"}
        async with asyncio.timeout(10):
            while (answer := await client.post(PATH, json=ask)).status_code == 404:  # noqa: ASYNC110 - a copy lives 5 s
                await asyncio.sleep(0.1)
            assert answer.status_code == 200
            settled, left = 1, 0
            while left != 1000 - 30 * settled:
                # What was bounded by bytes is given back; what is counted is reserved to the token.
                answer = await client.post(PATH, json=ask | {"max_tokens": 20})
                left = int(answer.headers["x-ratelimit-remaining-tokens"])
                settled += answer.status_code == 200
        assert asked == ["Bearer fleet-token-of-the-tests"]
        assert answer.headers["x-ratelimit-limit-tokens"] == "1000"


async def test_official_sdks_repeat_what_passes_by_and_not_what_does_not(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway(limits=[budget(0)]) as gateway:
        await gateway.register(await upstream(whole))
        seen: list[httpx.Response] = []

        async def note(response: httpx.Response) -> None:
            seen.append(response)

        async with httpx.AsyncClient(event_hooks={"response": [note]}) as http:
            client = openai.AsyncOpenAI(
                api_key=gateway.key, base_url=gateway.url + "/v1", max_retries=2, http_client=http
            )
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(**ASK)
            assert caught.value.code == "insufficient_quota"
            assert len(seen) == 1
            del seen[:]
            await gateway.directory.create_tenant(ACTOR, "poor", limits=[requests_per_minute(0)])
            key, _ = await gateway.directory.create_key(ACTOR, "poor", "k")
            with pytest.raises(openai.RateLimitError) as caught:
                await client.with_options(api_key=key).chat.completions.create(**ASK)
            assert caught.value.code == "rate_limit_exceeded"
            assert len(seen) == 1  # no waiting helps
