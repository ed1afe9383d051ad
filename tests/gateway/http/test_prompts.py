"""A tenant reads its own prompt log, never another's, and says what answers were worth."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.redis import create_redis
from gateway.clock import SystemClock
from gateway.datakeys.master_keys import MasterKeys
from gateway.datakeys.service import DataKeys
from gateway.ids import uuid7
from gateway.promptlog.entry import Entry
from gateway.promptlog.log import PromptLog
from gateway.redis_url import ClusterAddress, parse_redis_url
from tests.gateway.db.support import opened
from tests.gateway.http.prompt_support import Door, end_user_of, prompt_door
from tests.gateway.promptlog.support import FULL, METADATA, Digits, entry
from tests.gateway.tenants.support import ACTOR

PATH = "/v1/prompts"
READING = (PATH, f"{PATH}/search?text=x", f"{PATH}/export", f"{PATH}/{uuid4()}")


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    async with opened(database_url, pool_size=4) as engine:
        yield engine


@pytest.fixture
def log_url(redis_url: str) -> str:
    if isinstance(parse_redis_url(redis_url), ClusterAddress):
        pytest.skip("the prompt log wants one server, not a cluster")
    return redis_url


@pytest.fixture
async def door(log_url: str, engine: AsyncEngine) -> AsyncIterator[Door]:
    async with prompt_door(log_url, engine) as door:
        yield door


def told_as_openai_does(answer: Any, status: int, code: str | None, param: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert error["message"]


def ids(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [each["entry"]["request_id"] for each in answer.json()["data"]]


def lines(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


async def five(door: Door) -> list[Entry]:
    """Of acme, oldest first; the last of another model, end user, project, key, tag and status."""
    now = datetime.now(UTC)
    given = [
        entry(door.acme, f"Question {number}", admitted_at=now - timedelta(minutes=10 - number)) for number in range(4)
    ]
    other = entry(
        door.acme,
        "Where is the Sphinx?",
        model="large",
        status="failed",
        end_user=end_user_of(door.acme, "ann"),
        tags=("blue", "big"),
        project_id=uuid4(),
        key_id="pk2",
    )
    given.append(other)
    await door.rig.write(*given)
    await door.rig.write(entry(door.globex, "Where is the Sphinx buried?"))
    return given


async def test_a_tenant_reads_what_it_said(door: Door) -> None:
    given = await five(door)
    newest_first = [str(each.request_id) for each in reversed(given)]
    assert ids(await door.get(PATH, "acme")) == newest_first
    answer = await door.get(f"{PATH}/{given[4].request_id}", "acme")
    assert answer.headers["cache-control"] == "private, no-store"
    shown = answer.json()
    assert shown["request"]["messages"][0]["content"] == "Where is the Sphinx?"
    assert shown["response"]["choices"][0]["message"]["content"] == "You asked: Where is the Sphinx?"
    assert (shown["entry"]["model"], shown["entry"]["charged_nano_usd"], shown["feedback"]) == ("large", 1200, None)
    told = lines(await door.get(f"{PATH}/export", "acme"))
    assert [each["entry"]["request_id"] for each in told] == newest_first[::-1]
    assert told[4] == shown
    for text in (await door.get(PATH, "acme")).text, (await door.get(f"{PATH}/search", "acme", text="sphinx")).text:
        assert "Sphinx" not in text  # lists hold nothing of it


async def test_pages_filters_and_search(door: Door) -> None:
    given = await five(door)
    newest_first = [str(each.request_id) for each in reversed(given)]
    first = await door.get(PATH, "acme", limit=3)
    rest = await door.get(PATH, "acme", limit=3, cursor=first.json()["next_cursor"])
    assert ids(first) + ids(rest) == newest_first
    assert rest.json()["next_cursor"] is None
    last = given[4]
    for name, value in (
        ("model", "large"),
        ("status", "failed"),
        ("end_user", "ann"),
        ("end_user_hash", last.end_user),
        ("tag", "big"),
        ("project", str(last.project_id)),
        ("key", "pk2"),
        ("start", last.admitted_at.isoformat()),
    ):
        for path in (PATH, f"{PATH}/search"):
            more = {"text": "the SPHINX"} if path != PATH else {}
            assert ids(await door.get(path, "acme", **{name: value}, **more)) == newest_first[:1], name
        exported = lines(await door.get(f"{PATH}/export", "acme", **{name: value}))
        assert [each["entry"]["request_id"] for each in exported] == newest_first[:1], name
    assert ids(await door.get(PATH, "acme", end=last.admitted_at.isoformat())) == newest_first[1:]
    assert ids(await door.get(f"{PATH}/search", "acme", text="question 2")) == [newest_first[2]]
    assert ids(await door.get(f"{PATH}/search", "acme", text="question", status="failed")) == []


async def test_another_tenants_entries_are_not_there(door: Door) -> None:
    theirs = entry(door.globex, "A secret of Globex", end_user=end_user_of(door.globex, "ann"))
    await door.rig.write(theirs)
    for asked in (PATH, f"{PATH}?end_user={'ann'}", f"{PATH}?end_user_hash={theirs.end_user}"):
        assert ids(await door.get(asked, "acme")) == []
    assert ids(await door.get(f"{PATH}/search", "acme", text="secret")) == []
    assert lines(await door.get(f"{PATH}/export", "acme")) == []
    wanted = str(theirs.request_id)
    for suffix in ("", "/feedback"):
        told = []
        for named in (wanted, str(uuid7()), "nonsense", "%00", "{" + wanted + "}"):
            path = f"{PATH}/{named}{suffix}"
            answer = await (door.post(path, "acme", score=1) if suffix else door.get(path, "acme"))
            told_as_openai_does(answer, 404, "not_found", "request_id")
            told.append(answer.json()["error"]["message"].partition("'")[2].partition("'")[2])
        assert len(set(told)) == 1  # word for word what is said of what nobody has
    (kept,) = lines(await door.get(f"{PATH}/export", "globex"))
    assert kept["feedback"] is None


async def test_who_may_read_and_who_may_say_what_it_was_worth(door: Door) -> None:
    (given, *_) = await five(door)
    for path in READING:
        told_as_openai_does(await door.get(path, None), 401, "invalid_api_key")
        told_as_openai_does(await door.get(path, "owner"), 401, "invalid_api_key")
        told_as_openai_does(await door.get(path, "acme-inference"), 403, "insufficient_scope")
        told_as_openai_does(await door.get(path, "acme-usage"), 403, "insufficient_scope")
    path = f"{PATH}/{given.request_id}"
    told_as_openai_does(await door.post(f"{path}/feedback", None, score=1), 401, "invalid_api_key")
    told_as_openai_does(await door.post(f"{path}/feedback", "acme-usage", score=1), 403, "insufficient_scope")
    for caller, score in (("acme", 1), ("acme-inference", 0)):
        assert (await door.post(f"{path}/feedback", caller, score=score, comment="so so")).status_code == 204
    feedback = (await door.get(path, "acme")).json()["feedback"]
    assert (feedback["score"], feedback["comment"]) == (0, "so so")


async def test_feedback_that_cannot_be_meant(door: Door) -> None:
    headers = {"authorization": f"Bearer {door.keys['acme']}", "content-type": "application/json"}
    path = f"{PATH}/{uuid7()}/feedback"
    wrong = ['{"score": 1.5}', '{"score": "1"}', "{}", '{"score": NaN}', '{"score": 1, "stars": 5}', "", "[", '"\xff"']
    for told in wrong:
        answer = await door.client.post(path, content=told.encode("latin-1"), headers=headers)
        assert answer.status_code == 400, (told, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"
    long = {"score": 1, "comment": "x" * 2001}
    assert (await door.client.post(path, json=long, headers=headers)).status_code == 400
    assert (await door.client.post(path, content=b"x" * 70_000, headers=headers)).status_code == 413
    text = headers | {"content-type": "text/plain"}
    assert (await door.client.post(path, content=b"{}", headers=text)).status_code == 415


async def test_parameters_that_cannot_be_meant_are_named(door: Door) -> None:
    await five(door)
    for path in (PATH, f"{PATH}/search?text=x", f"{PATH}/export"):
        for name, value in (
            ("start", "yesterday"),
            ("start", "2026-01-01T00:00:00"),
            ("project", "web"),
            ("end_user_hash", "ann"),
            ("model", "\0"),
            ("tag", "x" * 1001),
            ("nonsense", "1"),
            ("tenant", "globex"),
            *(
                []
                if "export" in path
                else [("cursor", "9" * 40), ("cursor", "1-1\0"), ("limit", "501"), ("limit", "x")]
            ),
        ):
            url, _, query = path.partition("?")
            answer = await door.get(url, "acme", **dict([query.split("=")] if query else []), **{name: value})
            assert answer.status_code == 400, (path, name, answer.text)
            assert answer.json()["error"]["param"] == name, answer.text
    told_as_openai_does(await door.get(f"{PATH}/search", "acme"), 400, "bad_request")
    both = await door.get(PATH, "acme", end_user="ann", end_user_hash="a" * 32)
    assert both.status_code == 400
    for start, end in (("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"), ("9999-12-31T23:59:59-23:59", None)):
        query = {"start": start} | ({"end": end} if end else {})
        for path in (PATH, f"{PATH}/export"):
            assert (await door.get(path, "acme", **query)).status_code == 200


async def test_one_export_at_a_time_and_each_ends_its_turn(door: Door) -> None:
    await door.rig.write(*(entry(door.acme, "x" * 50_000) for _ in range(40)))
    answers = await asyncio.gather(*(door.get(f"{PATH}/export", "acme") for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 429, 429]
    assert len(lines(await door.get(f"{PATH}/export", "acme"))) == 40


async def test_what_was_not_logged_is_null_and_what_is_no_json_a_text(door: Door) -> None:
    bare = entry(door.acme)
    await door.rig.write(bare, policy=METADATA)
    odd = entry(door.acme, request=b"no \xff JSON", response=b"")
    await door.rig.write(odd)
    shown = (await door.get(f"{PATH}/{bare.request_id}", "acme")).json()
    assert (shown["request"], shown["response"], shown["entry"]["level"]) == (None, None, "metadata")
    assert (await door.get(f"{PATH}/{odd.request_id}", "acme")).json()["request"] == "no \ufffd JSON"


async def test_without_a_redis_for_it_the_answer_tells_what_to_set(log_url: str, engine: AsyncEngine) -> None:
    async with prompt_door(log_url, engine, off=True) as door:
        for path in READING:
            answer = await door.get(path, "acme")
            told_as_openai_does(answer, 503, "not_configured")
            assert "CACHE_REDIS_URL" in answer.text
        told_as_openai_does(await door.post(f"{PATH}/{uuid7()}/feedback", "acme", score=1), 503, "not_configured")
        for path in ("prompts", "prompts/search", "prompts/export", f"prompts/{uuid7()}", "cache/agreement"):
            text = {"text": "x"} if "search" in path else {}
            answer = await door.get(f"/admin/v1/{path}", tenant="acme", **text)
            assert (answer.status_code, "CACHE_REDIS_URL" in answer.json()["detail"]) == (503, True), path
        for path in ("prompts/erase", "cache/purge"):
            answer = await door.post(f"/admin/v1/{path}", tenant="acme")
            assert (answer.status_code, "CACHE_REDIS_URL" in answer.json()["detail"]) == (503, True), path
        assert await door.audited() == []


async def test_who_leaves_an_export_ends_it(start_gateway: Any, log_url: str) -> None:
    async with start_gateway() as gateway:
        tenant = await gateway.directory.tenant("acme")
        key, _ = await gateway.directory.create_key(ACTOR, "acme", "reads", scopes={"prompts:read"})
        masters, clock = MasterKeys.configured(gateway.settings.secret_key, None, None), SystemClock()
        async with (
            DataKeys(gateway.engine, masters, clock) as keys,
            PromptLog(create_redis(log_url, timeout_s=5), keys, clock, Digits) as log,
        ):
            for _ in range(40):
                log.record(FULL, entry(tenant.id, os.urandom(200_000).hex()))
            await log.flush()
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20) as client:
            async with client.stream("GET", f"{PATH}/export") as left:
                assert left.status_code == 200
                await anext(left.aiter_bytes())
                # It waits for who reads it, and holds the tenant's turn.
                assert (await client.get(f"{PATH}/export")).status_code == 429
            async with asyncio.timeout(10):
                while (whole := await client.get(f"{PATH}/export")).status_code == 429:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert len(lines(whole)) == 40
