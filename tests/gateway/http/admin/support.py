"""The admin API as its callers use it."""

from __future__ import annotations

from typing import Any

import httpx

ADMIN = "/admin/v1"


def client_of(gateway: Any, key: str | None = None) -> httpx.AsyncClient:
    """Of the owner, unless another key is given."""
    return httpx.AsyncClient(
        base_url=gateway.url + ADMIN, headers={"authorization": f"Bearer {key or gateway.admin_key}"}, timeout=20
    )


async def made(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    """What was created, as its answer shows it."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 201, answer.text
    location = answer.headers["location"]
    found = await client.get(str(client.base_url.copy_with(path=location)))
    assert found.status_code == 200, found.text
    assert found.headers["etag"] == answer.headers["etag"]
    shown = answer.json()
    assert {**found.json(), **({"secret": shown["secret"]} if "secret" in shown else {})} == shown
    return shown


def problem(answer: httpx.Response, status: int, *words: str) -> Any:
    """The problem details of an answer, which say ``words``."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["status"] == status
    for word in words:
        assert word in told["detail"], told
    return told
