"""Whatever comes to the doors of the prompt log is answered, and never as a fault of ours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.redis_url import ClusterAddress, parse_redis_url
from tests.gateway.db.support import opened
from tests.gateway.http.prompt_support import ADMIN, Door, prompt_door
from tests.gateway.promptlog.support import entry

WILD = (
    *("%00", "%ff", "%ed%a0%80", "a" * 5000, "%F0%9F%98%80", "0-0", "-", "+", "(1-1", "$", "*", "%0a", "..%2f", "'"),
    *("9" * 15 + "-" + "9" * 15, "18446744073709551616-0", "NaN", "1e999", "-1", "%C4%B0", "null", "[]", "%20"),
)
QUERIES = ("cursor", "limit", "start", "end", "model", "status", "end_user", "end_user_hash", "tag", "project", "key")
TEXTS = ("\0", "\ud800", "a\ud800b", "", " ", "x" * 100_000, "😀", "İ", "\u202e", "'; drop table data_keys")


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(database_url, pool_size=4) as engine:
        yield engine


@pytest.fixture
async def door(redis_url: str, engine: AsyncEngine) -> AsyncIterator[Door]:
    if isinstance(parse_redis_url(redis_url), ClusterAddress):
        pytest.skip("the prompt log wants one server, not a cluster")
    async with prompt_door(redis_url, engine) as door:
        await door.rig.write(entry(door.acme))
        yield door


async def test_queries(door: Door) -> None:
    for base, caller, more in (("/v1/prompts", "acme", ""), (f"{ADMIN}/prompts", "admin", "&tenant=acme")):
        for path, fixed in (("", ""), ("/search", "&text=x"), ("/export", "")):
            for name in (*QUERIES, "text", "tenant", "nonsense"):
                for value in WILD:
                    query = "&".join(each for each in (f"{name}={value}", fixed.strip("&"), more.strip("&")) if each)
                    answer = await door.get(f"{base}{path}?{query}", caller)
                    assert answer.status_code in (200, 400, 404), (base, path, name, value, answer.text)
                    json.loads(answer.text.splitlines()[0] if answer.text else "{}")


async def test_names_of_requests(door: Door) -> None:
    for value in WILD:
        for path, caller in ((f"/v1/prompts/{value}", "acme"), (f"{ADMIN}/prompts/{value}?tenant=acme", "admin")):
            answer = await door.get(path, caller)
            assert answer.status_code in (400, 404, 405), (path, answer.text)
        answer = await door.post(f"/v1/prompts/{value}/feedback", "acme", score=1)
        assert answer.status_code in (400, 404, 405), (value, answer.text)


async def test_bodies(door: Door) -> None:
    request_id = str(uuid4())
    given: list[tuple[str, str, dict[str, Any]]] = []
    for text in TEXTS:
        given += [
            (f"{ADMIN}/prompts/erase", "admin", {"tenant": text}),
            (f"{ADMIN}/prompts/erase", "admin", {"tenant": "globex", "end_user": text}),
            (f"{ADMIN}/prompts/erase", "admin", {"tenant": "globex", "end_user_hash": text}),
            (f"{ADMIN}/prompts/erase", "admin", {"tenant": "globex", "request_id": text}),
            (f"{ADMIN}/cache/purge", "admin", {"tenant": text}),
            (f"{ADMIN}/cache/purge", "admin", {"tenant": "globex", "model": text}),
            (f"{ADMIN}/cache/purge", "admin", {"tenant": "globex", "version": text}),
            (f"{ADMIN}/cache/purge", "admin", {"tenant": "globex", "tag": text}),
            (f"/v1/prompts/{request_id}/feedback", "acme", {"score": 1, "comment": text}),
        ]
    for path, caller, body in given:
        headers = {"authorization": f"Bearer {door.keys[caller]}", "content-type": "application/json"}
        answer = await door.client.post(path, content=json.dumps(body), headers=headers)
        assert answer.status_code in (200, 204, 400, 404, 413), (path, body, answer.text[:300])
    async for row in door.rig.reader.export(door.acme):  # nobody meant acme
        assert row
