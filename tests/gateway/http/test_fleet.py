from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec

from tests.gateway.tenants.support import budget
from worker.protocol.fleet import Registered

TOKEN = {"authorization": "Bearer fleet-token-of-the-tests"}


def record(worker_id: str = "w1", **more: Any) -> dict[str, Any]:
    values = {"base_url": "http://127.0.0.1:8100", "pool": "pool", "model": "m", "context_length": 10}
    return {"worker_id": worker_id} | values | more


def problem_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["title"]
    assert problem["detail"]
    assert isinstance(problem, dict)
    return problem


async def test_a_worker_joins_beats_and_leaves(gateway: Any) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, headers=TOKEN) as client:
        for _ in range(2):
            answer = await client.put("/internal/v1/workers/w1", json=record())
            assert answer.status_code == 200
            assert msgspec.json.decode(answer.content, type=Registered).ttl_s == gateway.settings.worker_ttl_s
        assert (await client.get("/readyz")).json()["backends"] == 1
        assert (await client.put("/internal/v1/workers/w2", json=record("w2", draining=True))).status_code == 200
        assert (await client.get("/readyz")).json()["backends"] == 1
        for _ in range(2):
            assert (await client.delete("/internal/v1/workers/w1")).status_code == 204
        assert (await client.get("/readyz")).json()["backends"] == 0
        # A worker of a later version may tell more than we know.
        assert (await client.put("/internal/v1/workers/w3", json=record("w3", new_field=1))).status_code == 200


async def test_only_the_fleet_token_opens_the_door(gateway: Any, start_gateway: Any) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for token in (None, "wrong", gateway.key, gateway.admin_key, "fleet-token-of-the-test", "é"):
            headers = {} if token is None else {b"authorization": f"Bearer {token}".encode("latin-1")}
            for method in ("PUT", "DELETE"):
                answer = await client.request(
                    method, "/internal/v1/workers/w1", content=json.dumps(record()), headers=headers
                )
                assert answer.status_code == 401, token
                assert "fleet-token-of" not in problem_of(answer)["detail"]
        assert (await client.get("/readyz")).json()["backends"] == 0


async def test_without_a_token_configured_nobody_registers(start_gateway: Any) -> None:
    async with start_gateway(fleet_token=None) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer None"}):
            answer = await client.put("/internal/v1/workers/w1", json=record(), headers=headers)
            assert answer.status_code == 401


async def test_records_that_make_no_sense_are_refused(gateway: Any) -> None:
    cases: list[tuple[bytes, int]] = [
        (b"", 400),
        (b"{", 400),
        (b"[" * 60_000, 400),
        (json.dumps(record("another")).encode(), 400),
        (json.dumps(record(context_length="many")).encode(), 400),
        (json.dumps(record(context_length=0)).encode(), 400),
        (json.dumps(record(base_url="file:///etc/passwd")).encode(), 400),
        (json.dumps(record(base_url="http://127.0.0.1:1/path")).encode(), 400),
        (json.dumps(record(base_url="http://user:pass@host")).encode(), 400),
        (json.dumps(record(base_url="http://h:99999")).encode(), 400),
        (json.dumps(record(base_url="http://[")).encode(), 400),
        (json.dumps(record(base_url="http://h]")).encode(), 400),
        (json.dumps(record(pool="undeclared")).encode(), 404),
        (b" " * 100_000, 413),
    ]
    async with httpx.AsyncClient(base_url=gateway.url, headers=TOKEN) as client:
        for body, status in cases:
            answer = await client.put("/internal/v1/workers/w1", content=body)
            assert answer.status_code == status, (body[:80], answer.text)
            problem_of(answer)
        answer = await client.put("/internal/v1/workers/w%0a1", json=record("w\n1"))
        assert answer.status_code == 400
        assert (await client.get("/readyz")).json()["backends"] == 0


async def test_a_worker_may_take_more_than_its_route_offers_and_that_is_reserved_for(
    start_gateway: Any, upstream: Any
) -> None:
    server = await upstream(lambda conversation: conversation.whole())
    limits = [budget(1_100_000)]  # nano-USD: 1000 tokens of prompt cost 1,000,000
    async with start_gateway(limits=limits) as gateway, httpx.AsyncClient(base_url=gateway.url) as client:
        await client.put(
            "/internal/v1/workers/w1", json=record(base_url=server.url, context_length=2000), headers=TOKEN
        )
        key = {"authorization": f"Bearer {gateway.key}"}
        for text, status in (("short", 200), ("x" * 1200, 429)):
            ask = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
            assert (await client.post("/v1/chat/completions", json=ask, headers=key)).status_code == status
