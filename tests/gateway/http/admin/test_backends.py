"""``/admin/v1/backends``, and routes with several targets, as administrators use them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from tests.gateway.conftest import whole_event
from tests.gateway.http.admin.support import client_of, made, problem
from tests.gateway.tenants.support import ACTOR

KEY = "sk-very-secret-key-of-a-provider"
HEADERS = {"x-org": "secret-organisation"}
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def backend(**more: Any) -> dict[str, Any]:
    values = {"name": "b", "pool": "pool", "brand": "generic", "base_url": "http://127.0.0.1:1"}
    return values | {"context_length": 1000} | more


async def ask(gateway: Any, model: str = "m") -> httpx.Response:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        headers = {"authorization": f"Bearer {gateway.key}"}
        return await client.post("/v1/chat/completions", json=ASK | {"model": model}, headers=headers)


async def test_a_declared_backend_serves_from_the_answer_on_until_it_is_gone(gateway: Any, upstream: Any) -> None:
    seen: list[dict[str, str]] = []

    async def whole(c: Any) -> None:
        if "content-type" in c.headers:  # else it is a probe, which may come at any time
            seen.append(c.headers)
        await c.status(200, whole_event())

    server = await upstream(whole)
    async with client_of(gateway) as client:
        shown = await made(client, "/backends", **backend(base_url=server.url, api_key=KEY, headers=HEADERS))
        assert (shown["has_api_key"], shown["header_names"], shown["version"]) == (True, ["x-org"], 1)
        assert (await client.get(gateway.url + "/readyz")).json()["backends"] == 1
        answer = await ask(gateway)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-penstock-backend"] == "b"
        assert (seen[0]["authorization"], seen[0]["x-org"]) == (f"Bearer {KEY}", "secret-organisation")
        changed = await client.patch("/backends/b", json={"api_key": "other", "model": "theirs"})
        assert changed.headers["etag"] == '"2"'
        assert (await ask(gateway)).status_code == 200
        assert seen[1]["authorization"] == "Bearer other"
        problem(await client.patch("/backends/b", json={"weight": 2}, headers={"if-match": '"1"'}), 412)
        assert (await client.patch("/backends/b", json={"enabled": False})).status_code == 200
        assert (await ask(gateway)).status_code == 503
        assert (await client.patch("/backends/b", json={"enabled": True})).status_code == 200
        problem(await client.delete("/pools/pool"), 409, "use the pool")
        assert (await client.delete("/backends/b")).status_code == 204
        assert (await ask(gateway)).status_code == 503
        problem(await client.get("/backends/b"), 404, "penstock backends list")
        everything = [await client.get(path) for path in ("/audit", "/backends", "/docs/openapi.json")]
        for secret in (KEY, "secret-organisation"):
            assert all(secret not in answer.text for answer in everything)


async def test_no_answer_and_no_log_tells_a_secret(gateway: Any, capfd: pytest.CaptureFixture[str]) -> None:
    viewer, _ = await gateway.directory.create_admin_key(ACTOR, "reads", role="viewer")
    secret = {"api_key": KEY, "headers": HEADERS}
    answers = []
    async with client_of(gateway) as client, client_of(gateway, viewer) as reader:
        answers += [await client.post("/backends", json=backend(**secret)) for _ in range(2)]
        answers += [await client.patch("/backends/b", json=body | {"weight": 1}) for body in (secret, {"weight": 3})]
        for bad in (
            {"weight": -1},
            {"base_url": "x"},
            {"brand": "x"},
            {"pool": "nowhere"},
            {"wieght": 1},
            {"headers": 1},
        ):
            answers.append(await client.post("/backends", json=backend(name="c") | secret | bad))
            assert answers[-1].status_code in (400, 404), answers[-1].text
        odd = {"api_key": f"{KEY} {KEY}"}
        answers.append(await client.post("/backends", json=backend(name="c") | odd))
        assert answers[-1].status_code == 400
        answers.append(await client.post("/backends/b/test", json={}))
        for one in (client, reader):
            answers += [await one.get(path) for path in ("/backends", "/backends/b", "/audit")]
        problem(await reader.post("/backends/b/test", json={}), 403)
    printed = capfd.readouterr()
    assert "declared_backends" in printed.out  # there is a log
    for text in (*(answer.text for answer in answers), printed.out, printed.err):
        assert "very-secret" not in text
        assert "secret-organisation" not in text


async def test_lists_have_pages_and_pools(gateway: Any) -> None:
    async with client_of(gateway) as client:
        await made(client, "/pools", name="other")
        for number in range(4):
            await made(client, "/backends", **backend(name=f"b{number}", pool="other" if number else "pool"))
        page = (await client.get("/backends", params={"limit": 2, "pool": "other"})).json()
        assert [each["name"] for each in page["data"]] == ["b1", "b2"]
        rest = (await client.get("/backends", params={"pool": "other", "after": page["next"]})).json()
        assert [each["name"] for each in rest["data"]] == ["b3"]
        assert rest["next"] is None
        problem(await client.get("/backends", params={"after": "\x00"}), 400, "after")
        for bad, field in (
            ({"name": "a/b"}, "name"),
            ({"headers": {"host": "x"}}, "headers"),
            ({"weight": -1}, "weight"),
        ):
            told = problem(await client.post("/backends", json=backend(**bad)), 400, field)
            assert told["errors"][0]["field"] == field


async def test_a_route_may_have_several_targets(gateway: Any) -> None:
    more = [{"pool": "other", "backend_model": "theirs", "weight": 0.5, "priority": 1}]
    async with client_of(gateway) as client:
        await made(client, "/pools", name="other")
        route = await made(client, "/routes", name="r", pool="pool", context_length=100, weight=3, more_targets=more)
        assert (route["weight"], route["priority"], route["more_targets"]) == (3.0, 0, more)
        changed = (await client.patch("/routes/r", json={"priority": 2})).json()
        assert changed == route | {"priority": 2, "version": 2}
        assert (await client.patch("/routes/r", json={"priority": 2, "more_targets": more})).json() == changed
        assert (await client.patch("/routes/r", json={"more_targets": []})).json()["more_targets"] == []
        problem(await client.delete("/pools/pool"), 409, "use the pool 'pool' (m, r)")
        for bad, status in (
            ({"more_targets": [{"pool": "other"}]}, 400),
            ({"more_targets": [more[0] | {"pool": "nowhere"}]}, 404),
            ({"more_targets": [more[0] | {"weight": -1}]}, 400),
            ({"more_targets": more * 20}, 400),
            ({"more_targets": None}, 400),
            ({"weight": -1}, 400),
            ({"priority": 101}, 400),
        ):
            problem(await client.patch("/routes/r", json=bad), status)


async def test_a_worker_may_join_any_pool_that_is_declared(gateway: Any) -> None:
    record = {"worker_id": "w", "base_url": "http://127.0.0.1:8100", "pool": "new", "model": "m", "context_length": 10}
    async with client_of(gateway) as client, httpx.AsyncClient(base_url=gateway.url) as worker:
        worker.headers["authorization"] = "Bearer fleet-token-of-the-tests"
        assert (await worker.put("/internal/v1/workers/w", json=record)).status_code == 404
        await made(client, "/pools", name="new")  # no route names it
        assert (await worker.put("/internal/v1/workers/w", json=record)).status_code == 200


async def test_a_backend_is_tried_step_by_step(gateway: Any, upstream: Any) -> None:
    async def server(c: Any) -> None:
        if c.head.startswith("GET /v1/models "):
            await c.status(200, b'{"object":"list","data":[{"id":"small"}]}')
        elif c.body.get("stream"):
            await c.begin()
            usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
            chunk = {"id": "c", "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}
            for event in (chunk, {"id": "c", "choices": [], "usage": usage}):
                await c.event(json.dumps(event).encode())
            await c.done()
        else:
            await c.status(401, b'{"error": {"message": "Incorrect API key provided: ' + KEY.encode() + b'"}}')

    running = await upstream(server)
    async with client_of(gateway) as client:
        await made(client, "/backends", **backend(base_url=running.url, api_key=KEY))
        told = (await client.post("/backends/b/test", json={})).json()
        assert not told["passed"]
        assert [(step["name"], step["passed"]) for step in told["steps"]] == [
            ("connect", True),
            ("models", True),
            ("chat", False),
        ]
        assert "API key" in told["steps"][-1]["detail"]
        assert KEY not in json.dumps(told)
        problem(await client.post("/backends/none/test", json={}), 404)
        problem(await client.post("/backends/b/test", json={"modle": "x"}), 400, "modle")


async def test_a_backend_that_takes_more_than_was_declared_is_told_of(gateway: Any, upstream: Any) -> None:
    async def whole(c: Any) -> None:
        await c.status(200, whole_event(prompt=5_000_000))

    server = await upstream(whole)
    async with client_of(gateway) as client:
        await made(client, "/backends", **backend(base_url=server.url))
        with capture_logs() as logs:
            assert (await ask(gateway)).status_code == 200
    assert [log["told"] for log in logs if log["event"] == "context_length_too_low"] == [5_000_000]
