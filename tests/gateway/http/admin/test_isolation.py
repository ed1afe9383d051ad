"""Who may do what at every door, found from the app's own routes: a new one fails here until its row is written."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from gateway.app import create_app
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.redis_url import ClusterAddress, parse_redis_url
from gateway.tenants.specs import TenantChange
from tests.gateway.http.admin.support import client_of, made
from tests.gateway.tenants.support import ACTOR

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
WRITING = {"POST", "PATCH", "PUT", "DELETE"}
OPEN = {"/healthz", "/readyz", "/metrics"}
"""Doors that ask for no key. The last has a rule of its own: ``tests/gateway/http/test_metrics.py``."""

# A tenant's doors: how to ask each for what is another tenant's. {request}, {route}, {key}, {project} are the other's.
TENANT_DOORS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("GET", "/v1/models"): [],  # names nothing; what it lists is looked at below
    ("GET", "/v1/models/{model:path}"): [{"path": "/v1/models/{route}"}],
    ("POST", "/v1/completions"): [{"path": "/v1/completions", "json": {"model": "{route}", "prompt": "hi"}}],
    ("POST", "/v1/embeddings"): [{"path": "/v1/embeddings", "json": {"model": "{route}", "input": "hi"}}],
    ("POST", "/v1/responses"): [{"path": "/v1/responses", "json": {"model": "{route}", "input": "hi"}}],
    ("GET", "/v1/responses/{response_id:str}"): [{"path": "/v1/responses/{response}"}],
    ("DELETE", "/v1/responses/{response_id:str}"): [{"path": "/v1/responses/{response}"}],
    ("GET", "/v1/responses/{response_id:str}/input_items"): [{"path": "/v1/responses/{response}/input_items"}],
    ("POST", "/v1/responses/{response_id:str}/cancel"): [{"path": "/v1/responses/{response}/cancel"}],
    ("POST", "/v1/chat/completions"): [{"path": "/v1/chat/completions", "json": ASK | {"model": "{route}"}}],
    ("POST", "/v1/messages"): [{"path": "/v1/messages", "json": ASK | {"model": "{route}", "max_tokens": 5}}],
    ("POST", "/v1/messages/count_tokens"): [
        {"path": "/v1/messages/count_tokens", "json": ASK | {"model": "{route}"}},
    ],
    ("GET", "/v1/usage"): [
        {"path": "/v1/usage", "params": {"key": "{key}"}},
        {"path": "/v1/usage", "params": {"project": "{project}"}},
    ],
    ("GET", "/v1/usage/{request_id:str}"): [{"path": "/v1/usage/{request}"}],
    # Lists name nothing, and what filters by ids finds nothing: ``tests/gateway/http/test_prompts.py``.
    ("GET", "/v1/prompts"): [],
    ("GET", "/v1/prompts/search"): [],
    ("GET", "/v1/prompts/export"): [],
    ("GET", "/v1/prompts/{request_id:str}"): [{"path": "/v1/prompts/{request}"}],
    ("POST", "/v1/prompts/{request_id:str}/feedback"): [
        {"path": "/v1/prompts/{request}/feedback", "json": {"score": 1}},
    ],
}


@dataclass(frozen=True)
class Door:
    method: str
    path: str
    """As the app declares it, with its parameters."""

    @property
    def parameters(self) -> list[str]:
        return [part[1:-1].partition(":")[0] for part in self.path.split("/") if part.startswith("{")]

    def with_values(self, values: dict[str, str]) -> str:
        parts = self.path.split("/")
        named = (part[1:-1].partition(":")[0] if part.startswith("{") else None for part in parts)
        return "/".join(part if name is None else values[name] for part, name in zip(parts, named, strict=True))


def doors(gateway: Any, prefix: str) -> list[Door]:
    app = create_app(gateway.settings)
    found = [
        Door(method, route.path)
        for route in app.routes
        if isinstance(route, HTTPRoute) and route.path.startswith(prefix)
        for handler in route.route_handlers
        if isinstance(handler, HTTPRouteHandler)
        for method in handler.http_methods
        if method not in ("OPTIONS", "HEAD")
    ]
    assert found
    return found


async def whole(c: Any) -> None:
    await c.whole()


async def test_another_tenants_things_are_not_there(gateway: Any, upstream: Any) -> None:
    if isinstance(parse_redis_url(gateway.settings.redis_url), ClusterAddress):
        pytest.skip("the prompt log wants one server, not a cluster")
    await gateway.register(await upstream(whole))
    await gateway.directory.create_tenant(ACTOR, "rival")
    await gateway.directory.update_tenant(ACTOR, "rival", TenantChange(prompt_log=PromptLogPolicy(level="full")))
    scopes = {"inference", "usage:read", "prompts:read"}
    theirs, key = await gateway.directory.create_key(ACTOR, "rival", "theirs", scopes=scopes)
    # Routes are everybody's; one that a key does not name is not there for it.
    mine, _ = await gateway.directory.create_key(ACTOR, "acme", "mine", scopes=scopes, allowed_models={"elsewhere"})
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
        client.headers["authorization"] = f"Bearer {theirs}"
        answer = await client.post("/v1/chat/completions", json=ASK)
        stored = await client.post("/v1/responses", json={"model": "m", "input": "hi"})
        await gateway.rows(2)
        other = {"request": answer.headers["x-request-id"], "route": "m", "key": key.public_id}
        other["response"] = stored.json()["id"]
        other["project"] = str(key.project_id)
        assert (await client.get(f"/v1/usage/{other['request']}")).status_code == 200
        assert (await client.get(f"/v1/responses/{other['response']}")).status_code == 200
        async with asyncio.timeout(5):
            while (await client.get(f"/v1/prompts/{other['request']}")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        client.headers["authorization"] = f"Bearer {mine}"
        found = {(door.method, door.path) for door in doors(gateway, "/v1")}
        assert found == TENANT_DOORS.keys()
        for (method, _path), asked in TENANT_DOORS.items():
            for wanted in asked:
                filled = json.loads(_fill(json.dumps(wanted), other))
                answer = await client.request(method, filled.pop("path"), **filled)
                assert_not_there(answer, other, wanted["path"])
                # Word for word what is said of what nobody has.
                nobody = {"request": str(uuid4()), "route": "x", "key": "k" * 12, "project": str(uuid4())}
                nobody["response"] = f"resp_{uuid4().hex}"
                filled = json.loads(_fill(json.dumps(wanted), nobody))
                like = await client.request(method, filled.pop("path"), **filled)
                assert like.status_code == answer.status_code
                assert _blank(_told(answer), other) == _blank(_told(like), nobody)
        assert (await client.get("/v1/models")).json()["data"] == []
        report = (await client.get("/v1/usage", params={"group_by": ["key", "project"]})).json()
        assert report["data"] == []
    await gateway.rows(2)


def _told(answer: httpx.Response) -> str:
    """Without the request's own id, which Anthropic's errors repeat."""
    return answer.text.replace(answer.headers.get("x-request-id", "-"), "-")


def assert_not_there(answer: httpx.Response, other: dict[str, str], path: str) -> None:
    if path == "/v1/usage":
        # A filter by what is not there finds nothing, or says that it is not there.
        assert answer.status_code == 404 or (
            answer.status_code == 200 and not any(row["requests"] for row in answer.json()["data"])
        ), answer.text
    else:
        assert answer.status_code == 404, answer.text
    for secret in ("rival", "theirs"):
        assert secret not in answer.text


async def test_under_one_tenant_no_administrator_finds_what_is_anothers(gateway: Any) -> None:
    async with client_of(gateway) as client:
        await made(client, "/tenants", name="rival")
        values = {
            "tenant": "acme",
            "project": (await made(client, "/tenants/rival/projects", name="secret-project"))["id"],
            "key": (await made(client, "/tenants/rival/keys", name="secret-key"))["id"],
            "limit_id": (await made(client, "/tenants/rival/limits", metric="concurrent", amount=7))["id"],
        }
        children = [
            door for door in doors(gateway, "/admin/v1/tenants/{tenant:str}/") if set(door.parameters) - {"tenant"}
        ]
        assert len(children) >= 10
        for door in children:
            assert set(door.parameters) <= values.keys(), f"{door}: give this test another tenant's value"
            body = {"json": {}} if door.method in ("POST", "PATCH") else {}
            answer = await client.request(door.method, gateway.url + door.with_values(values), **body)
            assert answer.status_code == 404, (door, answer.text)
            assert "secret" not in answer.text
        for path, body in (
            ("keys", {"name": "k", "project": values["project"]}),
            ("limits", {"metric": "concurrent", "amount": 1, "subject": "project", "target": values["project"]}),
            ("limits", {"metric": "concurrent", "amount": 1, "subject": "key", "target": values["key"]}),
        ):
            answer = await client.post(f"/tenants/acme/{path}", json=body)
            assert answer.status_code == 404, answer.text
        assert (await client.get("/tenants/acme/keys", params={"project": values["project"]})).status_code == 404


async def test_every_door_asks_for_a_key_of_its_kind_and_role(gateway: Any) -> None:
    viewer, _ = await gateway.directory.create_admin_key(ACTOR, "reads", role="viewer")
    admin, _ = await gateway.directory.create_admin_key(ACTOR, "works", role="admin")
    everywhere = [door for door in doors(gateway, "/") if not door.path.startswith("/docs")]
    assert {door.path for door in everywhere} >= OPEN
    values = dict.fromkeys({name for door in everywhere for name in door.parameters}, "x")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:

        async def status(door: Door, key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            body = {"json": {}} if door.method in ("POST", "PATCH", "PUT") else {}
            path = door.with_values(values).replace("//", "/")
            return (await client.request(door.method, path, headers=headers, **body)).status_code

        for door in everywhere:
            if door.path in OPEN:
                continue
            for key in (None, "nonsense", "sk-penstock-aaaaaaaaaaaa-" + "a" * 43):
                assert await status(door, key) == 401, door
            if door.path.startswith("/v1"):
                assert await status(door, gateway.admin_key) == 401, door
            elif door.path.startswith("/admin/v1"):
                assert await status(door, gateway.key) == 401, door
                writes = door.method in WRITING
                reads_what_was_said = door.path.startswith("/admin/v1/prompts")
                assert (await status(door, viewer) == 403) == (writes or reads_what_was_said), door
                only_owner = writes and "/admin-keys" in door.path
                assert (await status(door, admin) == 403) == only_owner, door
            else:
                assert door.path.startswith("/internal/v1"), f"{door}: say here who may use it"
                assert await status(door, gateway.admin_key) == 401, door


def _fill(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def _blank(text: str, values: dict[str, str]) -> str:
    """``text`` without what was asked for."""
    for value in sorted(values.values(), key=len, reverse=True):
        text = text.replace(f"'{value}'", "'?'")
    return text
