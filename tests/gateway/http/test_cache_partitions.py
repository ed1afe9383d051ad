"""Which requests share kept answers, through the doors: nobody gets what was made for another, or for other words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.policies.answer_cache import CachePolicy
from tests.gateway.conftest import whole_event
from tests.gateway.http.cache_support import CHAT, Kept, asking, being_kept, change, client_of, model, patient
from tests.gateway.http.shared_gateway import Shared, SharedGateway, shared_gateway
from tests.gateway.tenants.support import ACTOR

pytestmark = pytest.mark.asyncio(loop_scope="module")

POLICY = CachePolicy(mode="exact", sampled=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(databases: Any, redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shared]:
    with patient():
        async with shared_gateway(databases, redis_server, tmp_path_factory.mktemp("gateway")) as made:
            yield made


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(shared: Shared) -> AsyncIterator[SharedGateway]:
    await shared.script(model)
    view = await shared.view()
    await change(view, answer_cache=POLICY)
    yield view
    shared.check()


async def outcome(client: Any, ask: dict[str, Any], path: str = CHAT, **headers: str) -> str | None:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await client.post(path, json=ask, headers=told)
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-penstock-cache")  # type: ignore[no-any-return]


OTHERS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Fields? "}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fields?"}]},
    {"messages": [{"role": "user", "content": "Fields?", "name": "ann"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Fields?"}]}]},
    {"temperature": 0.5},
    {"temperature": 0.0},
    {"top_p": 0.5},
    {"top_p": 1},
    {"n": 2},
    {"n": 1},
    {"max_tokens": 40},
    {"max_completion_tokens": 41},
    {"stop": ["x"]},
    {"seed": 0},
    {"seed": 1},
    {"presence_penalty": 0},
    {"frequency_penalty": 0.1},
    {"logit_bias": {"1": 1}},
    {"logprobs": True},
    {"logprobs": False},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "text"}},
    {"parallel_tool_calls": False},
    {"tool_choice": "none"},
    {"tools": []},
    {"reasoning_effort": "low"},
    {"user": "ann"},
    {"safety_identifier": "ann"},
    {"prompt_cache_key": "a"},
    {"chat_template_kwargs": {"thinking": False}},
    {"top_k": 5},
    {"unheard_of": None},
]
SAME: list[dict[str, Any]] = [
    {"stream": True},
    {"stream": False},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"metadata": {"a": "b"}},
    {"service_tier": "auto"},
    {"store": False},
]


async def test_each_field_that_changes_the_answer_keeps_answers_apart(gateway: Any) -> None:
    ask = asking("Fields?")
    async with client_of(gateway) as client:
        async with being_kept(gateway):
            assert await outcome(client, ask) == "miss"
        async with being_kept(gateway, len(OTHERS)):
            for other in OTHERS:
                assert await outcome(client, ask | other) == "miss", other
        for same in SAME:
            assert await outcome(client, ask | same) == "exact", same
        for other in OTHERS:
            assert await outcome(client, ask | other) == "exact", other
        assert await outcome(client, dict(reversed(ask.items()))) == "exact"


async def test_owners_have_answers_of_their_own(gateway: Any) -> None:
    directory = gateway.directory
    ask = asking("Whose?")
    await directory.create_tenant(ACTOR, "rival")
    await change(gateway, POLICY, "rival")
    await directory.create_project(ACTOR, "acme", "side")
    rival, _ = await directory.create_key(ACTOR, "rival", "k")
    side, _ = await directory.create_key(ACTOR, "acme", "side", project="side")
    second, _ = await directory.create_key(ACTOR, "acme", "second")
    capped, _ = await directory.create_key(ACTOR, "acme", "capped", max_output_tokens=20)
    other, _ = await directory.create_key(ACTOR, "acme", "other", allowed_models=["none"])
    async with client_of(gateway) as client:
        async with being_kept(gateway):
            assert await outcome(client, ask) == "miss"
        assert await outcome(client, ask) == "exact"
        async with being_kept(gateway, 5):
            for header in ({"x_penstock_end_user": "ann"}, {"x_penstock_end_user": "bob"}):
                assert await outcome(client, ask, **header) == "miss", header
            for key in (rival, side, capped):
                async with client_of(gateway, key) as theirs:
                    assert await outcome(theirs, ask) == "miss"
    async with client_of(gateway, second) as same:
        assert await outcome(same, ask) == "exact"
        # By header and by field it is the same end user; yet the field is part of what a backend sees.
        assert await outcome(same, ask, x_penstock_end_user="ann") == "exact"
        await change(gateway, answer_cache=CachePolicy(mode="exact", across_end_users=True, across_projects=True))
        async with being_kept(gateway):
            assert await outcome(same, ask, x_penstock_end_user="carl") == "miss"
        assert await outcome(same, ask | {"user": "dora"}) == "exact"
        assert await outcome(same, ask | {"safety_identifier": "dora"}) == "exact"
        async with client_of(gateway, side) as beside:
            assert await outcome(beside, ask) == "exact"
        async with client_of(gateway, capped) as beside:
            assert await outcome(beside, ask) == "miss"
        async with client_of(gateway, other) as beside:
            assert (await beside.post(CHAT, json=ask)).status_code == 404


async def test_headers_of_a_request(gateway: Any, shared: Any) -> None:
    ask = asking("Which headers?")
    async with client_of(gateway) as client:
        async with being_kept(gateway):
            assert await outcome(client, ask, x_penstock_cache="refresh") == "refresh"
        assert await outcome(client, ask) == "exact"
        assert await outcome(client, ask, x_penstock_cache="off") is None
        assert await outcome(client, ask, x_penstock_cache="exact") == "exact"
        newer = asyncio.Event()

        async def other(c: Any) -> None:
            newer.set()
            await c.whole(whole_event("Lyon"))

        await shared.script(other)
        assert await outcome(client, ask) == "exact"
        assert await outcome(client, ask, x_penstock_cache="refresh") == "refresh"
        assert newer.is_set()
        async with asyncio.timeout(5):
            while True:
                again = await client.post(CHAT, json=ask)
                assert again.headers["x-penstock-cache"] == "exact"
                if again.json()["choices"][0]["message"]["content"] == "Lyon":
                    break
                await asyncio.sleep(0.02)
        for name, values in (
            ("x-penstock-cache", ("", "on", "EXACT", "exact, off")),
            ("x-penstock-cache-ttl", ("0", "-1", "1.5", "x", "", "9" * 30, "2592001", "١")),
        ):
            for value in values:
                answer = await client.post(CHAT, json=ask, headers={name: value.encode()})
                assert answer.status_code == 400, (name, value)
                assert name in answer.json()["error"]["message"]
    await change(gateway, answer_cache=CachePolicy(mode="exact", allowed="off"))
    async with client_of(gateway) as client:
        assert await outcome(client, ask, x_penstock_cache="exact") is None
    await change(gateway, answer_cache=CachePolicy())
    async with client_of(gateway) as client:
        assert await outcome(client, ask) is None
        assert await outcome(client, ask, x_penstock_cache="exact") == "exact"


async def test_hits_do_not_prolong_a_life(gateway: Any) -> None:
    ask = asking("How long?")
    async with client_of(gateway) as client:
        async with being_kept(gateway):
            began = time.monotonic()
            await outcome(client, ask, x_penstock_cache_ttl="2")
        while (found := await outcome(client, ask, x_penstock_cache_ttl="2")) == "exact":
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.2)
        assert found == "miss"


async def test_what_is_purged_is_forgotten(gateway: Any) -> None:
    admin = {"authorization": f"Bearer {gateway.admin_key}"}
    async with client_of(gateway) as client:
        asks = {tag: asking(f"Purged? {tag}") for tag in ("red", "blue")}
        async with being_kept(gateway, 2):
            for tag, ask in asks.items():
                await outcome(client, ask, x_penstock_tags=tag)
        for body, found in (({"tag": "red"}, ["miss", "exact"]), ({"model": "m"}, ["exact", "miss"])):
            if body == {"model": "m"}:
                async with being_kept(gateway):
                    await outcome(client, asks["red"], x_penstock_tags="red")
                found = ["miss", "miss"]
            purged = await client.post("/admin/v1/cache/purge", json={"tenant": "acme"} | body, headers=admin)
            assert purged.status_code == 200, purged.text
            assert purged.json()["purged"] >= 1
            told = [
                await outcome(client, ask, x_penstock_cache_ttl="1", x_penstock_tags=tag) for tag, ask in asks.items()
            ]
            assert told == found
            await asyncio.sleep(1.2)


async def test_sampled_answers_are_kept_only_if_wanted(gateway: Any) -> None:
    await change(gateway, answer_cache=CachePolicy(mode="exact"))
    async with client_of(gateway) as client:
        for number, (fields, found) in enumerate(
            [
                ({}, "miss"),
                ({"temperature": None}, "bypass"),
                ({"temperature": 0.01}, "bypass"),
                ({"temperature": 0.0}, "miss"),
            ]
        ):
            assert await outcome(client, asking(f"Sampled? {number}") | fields) == found
        left_out = asking("Sampled?")
        del left_out["temperature"]
        assert await outcome(client, left_out) == "bypass"
        assert await outcome(client, {"model": "m", "prompt": "Once"}, "/v1/completions") == "bypass"
        assert await outcome(client, {"model": "m", "max_tokens": 9} | left_out, "/v1/messages") == "bypass"


async def test_no_bad_answer_is_kept(gateway: Any, shared: Any) -> None:
    kept = Kept(gateway.settings.redis_url)
    async with client_of(gateway) as client:
        before = kept.names()
        for stream in (False, True):
            for finish in ("length", "content_filter"):
                await outcome(client, asking(f"Bad {stream}", finish=finish, stream=stream))
            tools = [{"type": "function", "function": {"name": "weather"}}]
            await outcome(client, asking("Tools", tools=tools, stream=stream))
            await outcome(client, asking("What is the latest news today?", stream=stream))

        async def cut(c: Any) -> None:
            await c.begin()
            await c.token("Par", 1)
            c.reset()

        async def refused(c: Any) -> None:
            await c.status(400, b'{"error": {"message": "no"}}')

        async def unfinished(c: Any) -> None:
            await c.begin()
            await c.token("Par", 1)
            await c.done()

        for script in (cut, refused, unfinished):
            await shared.script(script)
            async with client_of(gateway) as other:
                await other.post(CHAT, json=asking(script.__name__, stream=True))
        await shared.script(model)
        async with being_kept(gateway):
            await outcome(client, asking("A good one"))
        assert len(kept.names() - before) == 1
