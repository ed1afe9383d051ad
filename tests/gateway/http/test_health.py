from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
from litestar.testing import AsyncTestClient

from gateway.app import SCALAR_VERSION, create_app
from gateway.http.health import health_handlers
from gateway.settings import Settings
from worker.server.sampling_parameters import MAX_STOP_STRINGS


async def test_health_and_readiness(gateway: Any, upstream: Any) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        answer = await client.get("/healthz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        answer = await client.get("/readyz")
        assert answer.status_code == 200
        state = answer.json()
        assert state.pop("semantic_cache") in ("ok", "not known yet")
        assert state.pop("answer_cache") == "ok"
        assert state == {"status": "ready", "postgres": "ok", "schema": "ok", "redis": "ok", "backends": 0}


async def test_a_database_that_was_not_migrated_is_not_ready(empty_database_url: str, redis_url: str) -> None:
    app = create_app(Settings(database_url=empty_database_url, redis_url=redis_url, secret_key="s" * 32))
    async with AsyncTestClient(app) as client:
        async with asyncio.timeout(20):
            while (answer := await client.get("/readyz")).json()["postgres"] != "ok":  # noqa: ASYNC110 - tells no event
                await asyncio.sleep(0.1)
    assert (answer.status_code, answer.json()["schema"]) == (503, "unavailable")


async def test_many_who_ask_at_once_share_one_check() -> None:
    checks = 0

    async def check() -> None:
        nonlocal checks
        checks += 1
        await asyncio.sleep(0.01)

    _, readyz, *_ = health_handlers({"redis": check}, lambda: 0, needs_backend=False)
    answers = await asyncio.gather(*(readyz.fn() for _ in range(100)))
    assert {answer.status_code for answer in answers} == {200}
    assert checks == 1


async def test_readiness_may_wait_for_a_backend(start_gateway: Any, upstream: Any) -> None:
    async def nothing(_: Any) -> None: ...

    async with start_gateway(ready_needs_backend=True) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (503, "unready")
        answer = await client.head("/readyz")
        assert (answer.status_code, answer.content) == (503, b"")
        await gateway.register(await upstream(nothing))
        assert (await client.get("/readyz")).status_code == 200
        for path in ("/healthz", "/readyz"):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")


async def test_the_api_is_documented(gateway: Any) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        page = await client.get("/docs")
        assert page.status_code == 200
        assert "text/html" in page.headers["content-type"]
        assert "api-reference" in page.text
        elsewhere = re.findall(r"(?:src|href)=['\"](https?:[^'\"]*)", page.text)
        assert elsewhere == [f"https://cdn.jsdelivr.net/npm/@scalar/api-reference@{SCALAR_VERSION}"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", SCALAR_VERSION)
        schema = (await client.get("/docs/openapi.json")).json()
    chat = schema["paths"]["/v1/chat/completions"]["post"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["model", "messages"]
    assert body["properties"]["stop"]["oneOf"][1]["maxItems"] == MAX_STOP_STRINGS
    assert {"200", "400", "401", "404", "408", "413", "415", "429", "503"} <= set(chat["responses"])
    for door in ("chat/completions", "completions", "embeddings", "responses", "messages"):
        operation = schema["paths"][f"/v1/{door}"]["post"]
        asked = {parameter["name"] for parameter in operation["parameters"]}
        assert {"x-penstock-cache", "x-penstock-cache-ttl", "x-penstock-log"} <= asked
        told = operation["responses"]["200"]["headers"]["x-penstock-cache"]["schema"]["enum"]
        assert {"exact", "semantic", "miss", "bypass", "unavailable", "refresh", "shadow_hit", "verify"} == set(told)
    assert {"/v1/models", "/admin/v1/usage", "/healthz", "/readyz"} <= set(schema["paths"])
    assert schema["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
