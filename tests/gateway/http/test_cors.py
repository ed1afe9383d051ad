"""What pages of other origins may read, through the whole gateway."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.gateway.tenants.support import requests_per_minute

PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PAGE = "https://app.example.com"
OTHER = "https://evil.example.com"


async def paris(c: Any) -> None:
    if c.body.get("stream"):
        await c.begin()
        await c.token("Paris", 1)
        await c.done()
    else:
        await c.whole()


def granted(answer: httpx.Response) -> str | None:
    return answer.headers.get("access-control-allow-origin")


async def test_allowed_pages_read_every_answer_of_the_tenants_api(start_gateway: Any, upstream: Any) -> None:
    limits = [requests_per_minute(3)]
    async with start_gateway(
        cors_origins=(PAGE, "http://localhost:3000"), limits=limits, max_body_bytes=5000
    ) as gateway:
        await gateway.register(await upstream(paris))
        key = {"authorization": f"Bearer {gateway.key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers={"origin": PAGE}, timeout=20) as client:
            whole = await client.post(PATH, json=ASK, headers=key)
            stream = await client.post(PATH, json=ASK | {"stream": True}, headers=key)
            await client.post(PATH, json=ASK, headers=key)
            limited = await client.post(PATH, json=ASK, headers=key)
            answers = [
                *((200, whole), (200, stream), (429, limited)),
                (401, await client.post(PATH, json=ASK)),
                (400, await client.post(PATH, content=b"{", headers=key)),
                (413, await client.post(PATH, content=b"x" * 5001, headers=key)),
                (404, await client.get("/v1/nothing")),
                (405, await client.put("/v1/models")),
                (426, await client.get("/v1/realtime-chat")),
            ]
            for status, answer in answers:
                assert (answer.status_code, granted(answer)) == (status, PAGE)
                assert answer.headers["vary"] == "origin"
                assert "access-control-allow-credentials" not in answer.headers
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert whole.headers["access-control-expose-headers"].split(", ") == sorted(
                name for name in whole.headers if name.startswith(("x-ratelimit-", "x-penstock-", "x-request-id"))
            )
            messages = await client.post("/v1/messages", json=ASK)
            assert (messages.status_code, granted(messages)) == (401, PAGE)
            assert "request-id" in messages.headers["access-control-expose-headers"].split(", ")
            assert "retry-after" in limited.headers["access-control-expose-headers"]
            assert json.loads(stream.text.split("\n\n")[0].removeprefix("data: "))["model"] == "m"

            # Everything else is no page's.
            for path in ("/admin/v1/tenants", "/internal/workers", "/metrics", "/healthz", "/docs", "/v1x"):
                answer = await client.get(path)
                assert granted(answer) is None
                assert "vary" not in answer.headers
                assert granted(await client.options(path, headers={"access-control-request-method": "GET"})) is None

            for origin in (OTHER, "null", PAGE.upper(), PAGE + ".evil.com", PAGE + "/", ""):
                answer = await client.get("/v1/models", headers=key | {"origin": origin})
                assert (answer.status_code, granted(answer), answer.headers["vary"]) == (200, None, "origin")
        async with httpx.AsyncClient(base_url=gateway.url, headers=key) as client:
            plain = await client.get("/v1/models")
            assert (granted(plain), plain.headers["vary"]) == (None, "origin")
            assert "access-control-expose-headers" not in plain.headers
        await preflights(gateway)


async def preflights(gateway: Any) -> None:
    wanted = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-stainless-os",
    }
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for path in (PATH, "/v1/embeddings", "/v1/anything"):
            answer = await client.options(path, headers=wanted | {"origin": "http://localhost:3000"})
            assert (answer.status_code, answer.content) == (204, b"")
            assert granted(answer) == "http://localhost:3000"
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
            assert int(answer.headers["access-control-max-age"]) > 0
            assert answer.headers["vary"] == "origin"
        odd = wanted | {"origin": PAGE, "access-control-request-headers": "a\x7f"}
        assert (await client.options(PATH, headers=odd)).status_code in (204, 400)
        refused = await client.options(PATH, headers=wanted | {"origin": OTHER})
        assert (refused.status_code, granted(refused)) == (403, None)
        assert refused.json()["error"]["code"] == "origin_not_allowed"
        # No preflight, but a question what may be done there.
        plain = await client.options(PATH, headers={"origin": PAGE})
        assert (plain.status_code, granted(plain), plain.headers["allow"]) == (204, PAGE, "OPTIONS, POST")


async def test_every_page_may_call_if_that_is_wanted(start_gateway: Any, upstream: Any) -> None:
    async with start_gateway(cors_origins=("*",)) as gateway:
        await gateway.register(await upstream(paris))
        headers = {"authorization": f"Bearer {gateway.key}", "origin": OTHER}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
            answer = await client.post(PATH, json=ASK)
            preflight = await client.options(PATH, headers={"access-control-request-method": "POST"})
        assert (answer.status_code, preflight.status_code) == (200, 204)
        assert granted(answer) == granted(preflight) == "*"
