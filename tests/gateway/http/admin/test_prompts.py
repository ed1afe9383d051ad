"""Administrators read and erase what was said, and purge kept answers; each deed is on record before it is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.administration import prompts as administration
from gateway.admission.redis import RedisUnavailable
from gateway.cache.agreement import Agreements
from gateway.db.engine import DatabaseUnavailable
from gateway.http.prompt_answer import PIECE_BYTES, exported
from gateway.ids import uuid7
from gateway.policies.answer_cache import CachePolicy
from gateway.policies.prompt_log import PromptLogPolicy
from gateway.tenants.specs import TenantChange
from tests.gateway.cache.support import EXACT, chat, question, room
from tests.gateway.conftest import Conversation
from tests.gateway.http.admin.support import client_of, problem
from tests.gateway.http.prompt_support import ADMIN, SECRET_KEY, Door, end_user_of, prompt_door
from tests.gateway.http.test_prompts import door, engine, ids, lines, log_url
from tests.gateway.promptlog.support import entry
from tests.gateway.tenants.support import ACTOR

__all__ = ["door", "engine", "log_url"]

PATH = f"{ADMIN}/prompts"
PURGE = f"{ADMIN}/cache/purge"


async def test_an_administrator_reads_one_tenants_log_and_is_on_record(door: Door) -> None:
    mine = entry(door.acme, "Where is the Sphinx?", end_user=end_user_of(door.acme, "ann"))
    await door.rig.write(mine, entry(door.globex, "And the Sphinx' nose?"))
    for tenant in ("acme", str(door.acme)):
        assert ids(await door.get(PATH, tenant=tenant, end_user="ann")) == [str(mine.request_id)]
    assert await door.audited() == []  # a list holds nothing of what was said
    shown = (await door.get(f"{PATH}/{mine.request_id}", "owner", tenant="acme")).json()
    assert shown["request"]["messages"][0]["content"] == "Where is the Sphinx?"
    assert ids(await door.get(f"{PATH}/search", tenant="acme", text="sphinx")) == [str(mine.request_id)]
    (line,) = lines(await door.get(f"{PATH}/export", tenant="acme", end_user="ann"))
    assert line == shown
    read, searched, exported_ = await door.audited()
    assert (read.action, read.target, read.after) == ("read", str(mine.request_id), None)
    assert (searched.action, searched.target, searched.after) == ("search", "all", {})
    assert (exported_.action, exported_.after) == ("export", {"end_user": mine.end_user})
    assert {each.tenant_id for each in (read, searched, exported_)} == {door.acme}
    assert read.actor == door.keys["owner"].split("-")[2]
    # Under another tenant's name it is as one that nobody has.
    told = set()
    for named in (mine.request_id, uuid7(), "nonsense", "%00"):
        answer = problem(await door.get(f"{PATH}/{named}", tenant="globex"), 404)
        told.add(answer["detail"].partition("request '")[2].partition("'")[2])
    assert len(told) == 1


async def test_who_may(door: Door) -> None:
    doors: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", PATH, {}),
        ("GET", f"{PATH}/search", {"text": "x"}),
        ("GET", f"{PATH}/export", {}),
        ("GET", f"{PATH}/{uuid7()}", {}),
        ("POST", f"{PATH}/erase", {}),
        ("POST", PURGE, {}),
    ]
    for method, path, more in doors:
        asked = {"tenant": "acme", **more}
        call = door.get if method == "GET" else door.post
        for caller, status in ((None, 401), ("acme", 401), ("viewer", 403)):
            problem(await call(path, caller, **asked), status)
        assert (await call(path, "admin", **asked)).status_code in (200, 404)
        problem(await call(path, "admin", **asked | {"tenant": "initech"}), 404, "no tenant 'initech'")
        problem(await call(path, "admin", **more), 400)
    assert (await door.get(f"{ADMIN}/cache/agreement", "viewer", tenant="acme")).status_code == 200


async def test_what_cannot_be_meant_is_refused(door: Door) -> None:
    for path, body in (
        ("erase", {"tenant": "acme", "end_user": "ann", "end_user_hash": "a" * 32}),
        ("erase", {"tenant": "acme", "end_user": "ann", "request_id": str(uuid4())}),
        ("erase", {"tenant": "acme", "request_id": "x"}),
        ("erase", {"tenant": "acme", "end_user_hash": "ann"}),
        ("erase", {"tenant": "acme", "end_user": ""}),
        ("erase", {"tenant": "acme", "user": "ann"}),
    ):
        problem(await door.post(f"{PATH}/{path}", **body), 400)
    for field in ("model", "version", "tag"):
        for value in ("", "\0", "x" * 1001, 5):
            problem(await door.post(PURGE, tenant="acme", **{field: value}), 400)
    for days in ("0", "36", "x"):
        problem(await door.get(f"{ADMIN}/cache/agreement", tenant="acme", days=days), 400)
    assert await door.audited() == []


async def test_nothing_is_read_that_cannot_be_put_on_record(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    said = entry(door.acme, "Where is the Sphinx?")
    await door.rig.write(said)

    async def fail(*_: Any, **__: Any) -> None:
        raise DatabaseUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(administration, "audit", fail)
        for path, more in (
            (f"{PATH}/{said.request_id}", {}),
            (f"{PATH}/search", {"text": "x"}),
            (f"{PATH}/export", {}),
        ):
            answer = await door.get(path, tenant="acme", **more)
            problem(answer, 503)
            assert answer.headers["retry-after"]
        problem(await door.post(f"{PATH}/erase", tenant="acme"), 503)
    assert ids(await door.get(PATH, tenant="acme")) == [str(said.request_id)]
    await door.rig.redis.close()  # Redis is away
    for path in (PATH, f"{PATH}/export", f"{PATH}/{said.request_id}"):
        answer = await door.get(path, tenant="acme")
        problem(answer, 503)
        assert answer.headers["retry-after"]


async def test_erasure_by_request_end_user_and_tenant(door: Door) -> None:
    ann = end_user_of(door.acme, "ann")
    first, second, third, fourth = (entry(door.acme, end_user=whose) for whose in (ann, ann, "b" * 32, None))
    await door.rig.write(first, second, third, fourth, entry(door.globex, end_user=ann))
    for body, scope, gone, left in (
        ({"request_id": str(first.request_id)}, "request", 1, [fourth, third, second]),
        ({"request_id": str(first.request_id)}, "request", 0, [fourth, third, second]),
        ({"end_user": "ann"}, "end_user", 1, [fourth, third]),
        ({"end_user_hash": "b" * 32}, "end_user", 1, [fourth]),
        ({}, "tenant", 1, []),
    ):
        receipt = (await door.post(f"{PATH}/erase", tenant="acme", **body)).json()
        assert (receipt["scope"], receipt["counts"]["logged_prompts"]) == (scope, gone), body
        assert ids(await door.get(PATH, tenant="acme")) == [str(each.request_id) for each in left]
        begun, ended = (await door.audited())[-2:]
        assert (begun.action, ended.action, ended.after["id"]) == ("erase", "erased", receipt["id"])
        assert begun.target == ended.target == body.get("request_id", "all")
        if scope == "end_user":
            assert begun.after["end_user"] == ended.after["end_user"] == (ann if "end_user" in body else "b" * 32)
    assert len(lines(await door.get(f"{PATH}/export", tenant="globex"))) == 1


async def test_an_erasure_that_is_not_finished_is_no_success(log_url: str, engine: AsyncEngine) -> None:
    class Away:
        kind = "elsewhere"

        async def erase(self, tenant_id: UUID, *, end_user: str | None = None, request_id: UUID | None = None) -> int:
            raise RedisUnavailable("no answer in time")

    async with prompt_door(log_url, engine, others=[Away()]) as door:
        said = entry(door.acme)
        await door.rig.write(said)
        answer = await door.post(f"{PATH}/erase", tenant="acme")
        problem(answer, 503, "elsewhere: no answer in time", "again")
        assert answer.headers["retry-after"]
        assert ids(await door.get(PATH, tenant="acme")) == []
        assert (await door.audited())[-1].after["unfinished"] == {"elsewhere": "no answer in time"}


async def test_kept_answers_are_purged_by_what_they_are_known_by(door: Door) -> None:
    async with room(door.rig.url) as here:
        here.cache._purger._secret_key = here.cache._keeper._secret_key = SECRET_KEY
        asked = [
            question(chat(f"Question {number}"), EXACT, tenant_id=door.acme, route=route, version=version, tags=tags)
            for number, (route, version, tags) in enumerate(
                (("m", "1", ("red",)), ("m", "2", ("red",)), ("n", "2", ("blue",)), ("n", "1", ()))
            )
        ]
        for number, each in enumerate(asked):
            await here.answer(each, request_id=str(number))
        theirs = question(chat(), EXACT, tenant_id=door.globex)
        await here.answer(theirs)
        for body, gone, left in (
            ({"tag": "red", "version": "2"}, 1, [0, 2, 3]),
            ({"model": "n", "version": "2"}, 1, [0, 3]),
            ({"model": "x"}, 0, [0, 3]),
            ({}, 2, []),
        ):
            answer = await door.post(PURGE, tenant="acme", **body)
            assert answer.json() == {"purged": gone}, body
            assert [number for number, each in enumerate(asked) if await here.found(each)] == left
            purge = (await door.audited())[-1]
            assert (purge.action, purge.after, purge.tenant_id) == ("purge", body, door.acme)
        assert await here.found(theirs)


async def test_agreement_is_told(door: Door) -> None:
    path = f"{ADMIN}/cache/agreement"
    nothing = {"days": 30, "agreed": 0, "disagreed": 0, "false_hit_rate": None}
    assert (await door.get(path, tenant="acme")).json() == nothing
    now = (await door.directory.tenant("acme")).created_at
    for agreed in (True, True, True, False):
        await Agreements(door.rig.redis).count(door.acme, agreed, now)
    told = (await door.get(path, tenant="acme", days=2)).json()
    assert told == {"days": 2, "agreed": 3, "disagreed": 1, "false_hit_rate": 0.25}
    assert (await door.get(path, tenant="globex")).json() == nothing


async def test_an_export_is_sent_in_bounded_pieces_and_broken_off_by_a_fault() -> None:
    closed = []

    async def given(fault_after: int) -> AsyncGenerator[bytes, None]:
        try:
            for number in range(200):
                if number == fault_after:
                    raise RedisUnavailable("away")
                yield b"x" * 5000
        finally:
            closed.append(fault_after)

    async def pieces(of: Any) -> AsyncIterator[bytes]:
        async for piece in of.iterator:
            yield piece

    sizes = [len(piece) async for piece in pieces(await exported(given(1000)))]
    assert sum(sizes) == 200 * 5000
    assert max(sizes) < PIECE_BYTES + 5000
    with pytest.raises(RedisUnavailable):  # has a status of its own
        await exported(given(3))
    stream = pieces(await exported(given(50)))
    with pytest.raises(RedisUnavailable):  # the answer has begun: it ends without its end
        async for _ in stream:
            pass
    assert closed == [1000, 3, 50]


async def test_in_a_gateway_what_is_erased_is_gone_from_all_rooms(
    start_gateway: Any, upstream: Any, log_url: str
) -> None:
    async def whole(c: Conversation) -> None:
        await c.whole()

    async with start_gateway() as gateway:
        await gateway.register(await upstream(whole))
        policies = TenantChange(answer_cache=CachePolicy(mode="exact"), prompt_log=PromptLogPolicy(level="full"))
        await gateway.directory.update_tenant(ACTOR, "acme", policies)
        key, _ = await gateway.directory.create_key(ACTOR, "acme", "all", scopes={"inference", "prompts:read"})
        headers = {"authorization": f"Bearer {key}", "x-penstock-end-user": "ann"}
        async with (
            httpx.AsyncClient(base_url=gateway.url + "/v1", headers=headers, timeout=20) as client,
            client_of(gateway) as admin,
            asyncio.timeout(60),
        ):
            for wanted in ("chat", "response", "end_user", "tenant"):
                ask = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": f"What is {wanted}?"}]}
                once = {"idempotency-key": wanted}
                chat = await client.post("/chat/completions", json=ask, headers=once)
                response = await client.post("/responses", json={"model": "m", "input": "Hello"})
                requests = {"chat": chat.headers["x-request-id"], "response": response.headers["x-request-id"]}
                for request_id in requests.values():
                    while (await client.get(f"/prompts/{request_id}")).status_code != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                while (await client.post("/chat/completions", json=ask)).headers["x-penstock-cache"] != "exact":  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                replay = await client.post("/chat/completions", json=ask, headers=once)
                assert replay.headers["idempotent-replayed"] == "true"

                bodies = {"end_user": {"end_user": "ann"}, "tenant": {}}
                bodies |= {name: {"request_id": request_id} for name, request_id in requests.items()}
                receipt = await admin.post("/prompts/erase", json={"tenant": "acme", **bodies[wanted]})
                assert receipt.status_code == 200, receipt.text
                counts = receipt.json()["counts"]
                chat_gone, response_gone = wanted != "response", wanted != "chat"
                assert (counts["cached_answers"] >= 1) == (counts["idempotency_answers"] >= 1) == chat_gone, counts
                assert (counts["stored_responses"] >= 1) == response_gone, counts
                for request_id, gone in ((requests["chat"], chat_gone), (requests["response"], response_gone)):
                    assert ((await client.get(f"/prompts/{request_id}")).status_code == 404) == gone
                stored = await client.get(f"/responses/{response.json()['id']}")
                assert (stored.status_code == 404) == response_gone
                asked = await client.post("/chat/completions", json=ask)
                assert (asked.headers.get("x-penstock-cache") != "exact") == chat_gone
                again = await client.post("/chat/completions", json=ask, headers=once)
                assert ("idempotent-replayed" not in again.headers) == chat_gone
