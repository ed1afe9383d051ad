"""Counting prompts, and models in Anthropic's shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway.backends.brands import BRANDS
from gateway.http.anthropic.count_tokens import MOST_AT_ONCE
from gateway.routing.route import Route
from gateway.secret_key import SecretKey
from gateway.tenants.backend_changes import BackendChanges
from gateway.tenants.backend_specs import BackendSpec
from tests.gateway.tenants.support import ACTOR
from tests.standins.base import Reply, Request, StandIn

HI: list[Any] = [{"role": "user", "content": "hello there"}]
SEARCH: Any = [{"type": "web_search_20250305", "name": "web_search"}]


class Counting(StandIn):
    """An Anthropic backend that counts."""

    brand = "anthropic"

    def answer(self, request: Request, scenario: str) -> Reply:
        if scenario == "down":
            return Reply(529, b'{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}')
        if request.path == "/v1/messages/count_tokens":
            return Reply(body=b'{"input_tokens": 2095}')
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "stop_reason": "end_turn"}
        content = [{"type": "text", "text": "Found."}]
        usage = {"input_tokens": 9, "output_tokens": 2}
        return Reply(body=json.dumps(message | {"content": content, "stop_sequence": None, "usage": usage}).encode())


def sdk_of(gateway: Any, key: str | None = None) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key or gateway.key, max_retries=0)


async def create_route(gateway: Any, name: str) -> None:
    route = Route(name, "pool", "m", context_length=1000, default_output_tokens=50, max_output_tokens=500, timeout_s=30)
    await gateway.create_route(route)


async def test_prompts_are_counted_without_being_run(gateway: Any) -> None:
    count = {"model": "m", "messages": HI}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 400_000}}
    async with sdk_of(gateway) as sdk:
        raw = await sdk.messages.with_raw_response.count_tokens(**count)  # type: ignore[arg-type]
        assert raw.headers["x-penstock-counted-by"] == "estimate"
        plain = (await raw.parse()).input_tokens
        assert 0 < plain < 40
        pictured = await sdk.messages.count_tokens(model="m", messages=[{"role": "user", "content": [image]}])  # type: ignore[typeddict-item]
        assert 1000 < pictured.input_tokens < 3000
        with pytest.raises(anthropic.NotFoundError):
            await sdk.messages.count_tokens(model="other", messages=HI)
        with pytest.raises(anthropic.BadRequestError):
            await sdk.messages.count_tokens(model="m", messages=[])
    await gateway.rows(0)


async def test_few_prompts_of_a_tenant_are_counted_at_once(gateway: Any) -> None:
    """Bodies that do not arrive hold their turns, and give them back when their clients leave."""
    host, port = gateway.url.removeprefix("http://").split(":")
    head = f"POST /v1/messages/count_tokens HTTP/1.1\r\nhost: x\r\nx-api-key: {gateway.key}\r\ncontent-length: 9\r\n"
    await gateway.directory.create_tenant(ACTOR, "other")
    other, _ = await gateway.directory.create_key(ACTOR, "other", "test")
    held = []
    async with sdk_of(gateway) as sdk, asyncio.timeout(10):

        async def wait_to_be(served: bool) -> None:
            while True:
                try:
                    await sdk.messages.count_tokens(model="m", messages=HI)
                except anthropic.RateLimitError as refused:
                    assert refused.response.headers["retry-after"] == "1"
                    if not served:
                        return
                else:
                    if served:
                        return

        for _ in range(MOST_AT_ONCE):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"{head}\r\n".encode())
            held.append(writer)
        await wait_to_be(served=False)
        await sdk.with_options(api_key=other).messages.count_tokens(model="m", messages=HI)
        for writer in held:
            writer.close()
            await writer.wait_closed()
        await wait_to_be(served=True)
    await gateway.rows(0)


async def test_a_known_tokenizer_counts(gateway: Any) -> None:
    route = Route("gpt", "pool", "m", 1000, 50, 500, 30, tokenizer="o200k_base")
    await gateway.create_route(route)
    async with sdk_of(gateway) as sdk:
        async with asyncio.timeout(10):
            while True:
                raw = await sdk.messages.with_raw_response.count_tokens(model="gpt", messages=HI, system="be")
                if raw.headers["x-penstock-counted-by"] == "tokenizer":
                    break
                await asyncio.sleep(0.05)
        # 3 for the request; of each message 3, one for its role, and its text: "be", "hello there".
        assert (await raw.parse()).input_tokens == 3 + (3 + 1 + 1) + (3 + 1 + 2)


async def test_a_backend_of_anthropics_kind_counts_and_knows_its_own_tools(gateway: Any) -> None:
    async with Counting() as backend:
        changes = BackendChanges(gateway.engine, SecretKey(gateway.settings.secret_key), BRANDS)
        spec = BackendSpec(name="claude", pool="pool", brand="anthropic", base_url=backend.url, context_length=1000)
        await changes.create_backend(ACTOR, spec)
        async with sdk_of(gateway) as sdk:
            # Declared backends are seen within seconds.
            async with asyncio.timeout(10):
                while True:
                    found = await sdk.messages.count_tokens(model="m", messages=HI, tools=SEARCH)
                    if found.input_tokens == 2095:
                        break
                    await asyncio.sleep(0.1)
            assert backend.seen[-1].body == {"model": "m", "messages": HI, "tools": SEARCH}
            assert gateway.key not in str(backend.seen[-1].headers)
            # What no chat completion can say is said here: the body is passed on as it came.
            message = await sdk.messages.create(model="m", max_tokens=9, messages=HI, tools=SEARCH)
            assert (message.id, message.model, message.content[0].text) == ("msg_1", "m", "Found.")  # type: ignore[union-attr]
            assert backend.seen[-1].body == {"model": "m", "messages": HI, "tools": SEARCH, "max_tokens": 9}
            backend.scenario = "down"
            found = await sdk.messages.count_tokens(model="m", messages=HI)
            assert 0 < found.input_tokens < 40
            with pytest.raises(anthropic.InternalServerError) as busy:
                await sdk.messages.create(model="m", max_tokens=9, messages=HI)
            assert busy.value.type == "overloaded_error"


async def test_models_in_anthropics_shape_and_pages(gateway: Any) -> None:
    for name in ("a", "b/c", "z"):
        await create_route(gateway, name)
    async with sdk_of(gateway) as sdk:
        names = ["a", "b/c", "m", "z"]
        assert [model.id async for model in await sdk.models.list(limit=1)] == names
        page = await sdk.models.list(limit=2, before_id="z")
        assert [model.id for model in page.data] == ["b/c", "m"]
        assert (page.has_more, page.first_id, page.last_id) == (True, "b/c", "m")
        assert [model.id async for model in await sdk.models.list(limit=2, before_id="z")] == ["b/c", "m", "a"]
        assert (await sdk.models.list(after_id="z")).data == []
        model = await sdk.models.retrieve("b/c")
        assert (model.type, model.display_name, model.max_input_tokens, model.max_tokens) == ("model", "b/c", 1000, 500)
        assert (model.lifecycle, model.created_at.year) == ("active", 1970)
        with pytest.raises(anthropic.NotFoundError) as missing:
            await sdk.models.retrieve("other")
        assert missing.value.type == "not_found_error"
        for bad in (0, 1001, -1):
            with pytest.raises(anthropic.BadRequestError, match="limit"):
                await sdk.models.list(limit=bad)
        with pytest.raises(anthropic.BadRequestError, match="before_id"):
            await sdk.models.list(before_id="a", after_id="b")
    narrow, _ = await gateway.directory.create_key(ACTOR, "acme", "narrow", allowed_models={"z"})
    async with sdk_of(gateway, narrow) as sdk:
        assert [model.id async for model in await sdk.models.list()] == ["z"]
    with anthropic.Anthropic(base_url=gateway.url, auth_token=gateway.key, api_key=None) as blocking:
        listed = await asyncio.to_thread(lambda: [model.id for model in blocking.models.list()])
        assert listed == names
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key=gateway.key) as other:
        assert [model.id async for model in other.models.list()] == names
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        told = (await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")
        assert "code" in (await client.get("/v1/models")).json()["error"]
        # What only OpenAI has speaks its language, to whomever; either header bears a key, everywhere.
        headers = {"anthropic-version": "2023-06-01", "x-api-key": gateway.key}
        missed = (await client.get("/v1/responses/resp_x", headers=headers)).json()
        assert missed["error"]["code"] == "response_not_found"
        paths = (await client.get("/docs/openapi.json")).json()["paths"]
        for path, required in (("/v1/messages", 3), ("/v1/messages/count_tokens", 2)):
            schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert len(schema["required"]) == required
