"""What is kept of responses: for whom, how long, and what of answers that came to no good end."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import func, select, text

from gateway.clock import SystemClock
from gateway.db.tables import stored_responses
from tests.gateway.http.openai.responses_support import PATH, chunk, saying, sdk_of
from tests.gateway.tenants.support import ACTOR


class Ahead(SystemClock):
    """The time, some days ahead."""

    def __init__(self) -> None:
        self.days = 0.0

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(days=self.days)


async def count(gateway: Any) -> int:
    async with gateway.engine.connect() as connection:
        return int(await connection.scalar(select(func.count()).select_from(stored_responses)) or 0)


async def test_only_its_tenant_finds_a_response(gateway: Any, upstream: Any) -> None:
    await gateway.register(await upstream(saying("A secret.")))
    await gateway.directory.create_tenant(ACTOR, "other")
    other_key, _ = await gateway.directory.create_key(ACTOR, "other", "test")
    usage_only, _ = await gateway.directory.create_key(ACTOR, "acme", "reports", scopes={"usage:read"})
    same_tenant, _ = await gateway.directory.create_key(ACTOR, "acme", "second")
    async with sdk_of(gateway) as sdk, sdk_of(gateway, other_key) as other, sdk_of(gateway, usage_only) as reader:
        kept = await sdk.responses.create(model="m", input="Tell me")
        nobodys = "resp_" + "0" * 32

        async def told(response_id: str) -> list[str]:
            answers = []
            for call in (
                other.responses.retrieve(response_id),
                other.responses.input_items.list(response_id),
                other.responses.delete(response_id),
                other.responses.cancel(response_id),
            ):
                with pytest.raises(openai.NotFoundError) as missing:
                    await call
                answers.append(missing.value.response.text.replace(response_id, ""))
            with pytest.raises(openai.BadRequestError) as unknown:
                await other.responses.create(model="m", input="And?", previous_response_id=response_id)
            assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")
            return [*answers, unknown.value.response.text.replace(response_id, "")]

        assert await told(kept.id) == await told(nobodys)
        with pytest.raises(openai.PermissionDeniedError):
            await reader.responses.retrieve(kept.id)
        async with sdk_of(gateway, same_tenant) as colleague:
            assert (await colleague.responses.retrieve(kept.id)).output_text == "A secret."
            await colleague.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(kept.id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.delete(kept.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await sdk.responses.create(model="m", input="And?", previous_response_id=kept.id)
    assert await count(gateway) == 0


async def test_what_is_kept_is_sealed_and_expires(start_gateway: Any, upstream: Any) -> None:
    clock = Ahead()
    async with start_gateway(gateway_clock=clock, responses_retention_days=7) as gateway:
        await gateway.register(await upstream(saying("The answer.")))
        async with sdk_of(gateway) as sdk:
            first = await sdk.responses.create(model="m", input="A question.")
            clock.days = 6.9
            second = await sdk.responses.create(model="m", input="Another.", previous_response_id=first.id)
            async with gateway.engine.connect() as connection:
                rows = (await connection.execute(select(stored_responses))).all()
            assert len(rows) == 2
            assert not any(b"question" in row.sealed or b"answer" in row.sealed for row in rows)
            clock.days = 7.1
            with pytest.raises(openai.NotFoundError):
                await sdk.responses.retrieve(first.id)
            with pytest.raises(openai.BadRequestError, match="not found"):
                await sdk.responses.create(model="m", input="And?", previous_response_id=first.id)
            # What follows it holds the whole conversation itself.
            items = [item async for item in await sdk.responses.input_items.list(second.id, order="asc")]
            assert len(items) == 3


async def test_what_is_not_kept(gateway: Any, upstream: Any) -> None:
    async def cut(c: Any) -> None:
        await c.begin()
        await c.event(chunk(content="Par"))

    gone = asyncio.Event()

    async def endless(c: Any) -> None:
        await c.begin()
        await c.event(chunk(content="Par"))
        await c.wait_closed_by_peer()
        gone.set()

    await gateway.register(await upstream(saying("Paris"), cut, endless, saying("Paris")))
    async with sdk_of(gateway) as sdk:
        unkept = await sdk.responses.create(model="m", input="a", store=False)
        assert (unkept.store, unkept.output_text) == (False, "Paris")
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(unkept.id)
        broken = await sdk.responses.create(model="m", input="a", stream=True)
        with pytest.raises(openai.APIError):
            assert [event async for event in broken] == []
        async with httpx.AsyncClient(
            base_url=gateway.url, headers={"authorization": f"Bearer {gateway.key}"}
        ) as client:
            asked = {"model": "m", "input": "a", "stream": True}
            async with client.stream("POST", PATH, json=asked) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("event: response.output_text.delta"):
                        break
        async with asyncio.timeout(5):
            await gone.wait()
        assert [row.status for row in await gateway.rows(3)] == ["ok", "failed", "aborted"]
        assert await count(gateway) == 0
        # The table is away: the answer comes all the same, and says what became of it.
        async with gateway.engine.begin() as connection:
            await connection.execute(text("ALTER TABLE stored_responses RENAME TO elsewhere"))
        async with sdk.responses.stream(model="m", input="a") as stream:
            streamed = await stream.get_final_response()
        assert (streamed.store, streamed.output_text) == (False, "Paris")


async def test_nothing_is_kept_where_the_operator_says_so(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway(responses_retention_days=0) as gateway:
        await gateway.register(await upstream(saying("Paris")))
        async with sdk_of(gateway) as sdk:
            answer = await sdk.responses.create(model="m", input="a")
            assert (answer.store, answer.output_text) == (False, "Paris")
        assert await count(gateway) == 0


async def test_a_replay_is_the_first_answer_and_keeps_nothing(gateway: Any, upstream: Any) -> None:
    server = await upstream(saying("Paris"))
    await gateway.register(server)
    headers = {"authorization": f"Bearer {gateway.key}", "idempotency-key": "once"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client, sdk_of(gateway) as sdk:
        for stream in (False, True):
            client.headers["idempotency-key"] = f"once-{stream}"
            asked = {"model": "m", "input": "a", "stream": stream}
            first = await client.post(PATH, json=asked)
            (made,) = [item.id for item in [await sdk.responses.retrieve(response_id(first.text))]]
            await sdk.responses.delete(made)
            again = await client.post(PATH, json=asked)
            assert again.headers["idempotent-replayed"] == "true"
            assert again.text == first.text
            with pytest.raises(openai.NotFoundError):
                await sdk.responses.retrieve(made)
    assert len(server.seen) == 2
    assert await count(gateway) == 0


def response_id(answer: str) -> str:
    begin = answer.index("resp_")
    return answer[begin : begin + 37]


async def test_a_conversation_counts_to_every_limit(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway(max_body_bytes=4000) as gateway:
        await gateway.register(await upstream(saying("Yes. " * 300)))
        async with sdk_of(gateway) as sdk:
            first = await sdk.responses.create(model="m", input="a" * 1500)
            with pytest.raises(openai.APIStatusError, match="4000 bytes") as long:
                await sdk.responses.create(model="m", input="a" * 1500, previous_response_id=first.id)
            assert (long.value.status_code, long.value.code) == (413, "request_too_large")
            short = await sdk.responses.create(model="m", input="a", previous_response_id=first.id)
            assert short.output_text
        small, _ = await gateway.directory.create_key(ACTOR, "acme", "small", max_context_tokens=600)
        async with sdk_of(gateway, small) as sdk:
            assert (await sdk.responses.create(model="m", input="a")).output_text
            with pytest.raises(openai.BadRequestError, match="600 tokens") as many:
                await sdk.responses.create(model="m", input="a", previous_response_id=first.id)
            assert (many.value.code, many.value.param) == ("context_length_exceeded", "input")
