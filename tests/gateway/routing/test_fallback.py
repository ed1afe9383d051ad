"""What is tried again elsewhere and what is not, through the whole gateway; and what the ledger says of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from gateway.routing.route import Target, new_route
from tests.gateway.conftest import Conversation, GatewayFactory, UpstreamFactory, chunk_event
from tests.gateway.routing.app_support import Script, Site, answer, asked, never, refuse
from tests.ports import free_port


@pytest.fixture
async def site(start_gateway: GatewayFactory, upstream: UpstreamFactory) -> AsyncIterator[Site]:
    async with (
        start_gateway(connect_timeout_s=1.0) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=30.0) as client,
    ):
        yield Site(gateway, upstream, client)


async def closed(c: Conversation) -> None:
    """Breaks off before anything."""


async def cut(c: Conversation) -> None:
    """Breaks off within the head."""
    await c.send(b"HTTP/1.1 200 OK\r\ncontent-")


async def cut_before_the_first_token(c: Conversation) -> None:
    await c.begin()


async def error_event(c: Conversation) -> None:
    await c.begin()
    await c.event(b'{"error":{"message":"out of memory","type":"server_error","code":"oom"}}')


async def fails_in_mid_stream(c: Conversation) -> None:
    await c.begin()
    await c.event(chunk_event("Par"))
    await c.event(b'{"error":{"message":"out of memory","type":"server_error","code":"oom"}}')


# What a first backend does, and whether the second one is asked.
TABLE: dict[str, tuple[Script, bool]] = {
    "400": (refuse(400), False),
    "413": (refuse(413), False),
    "422": (refuse(422), False),
    # These speak of the gateway's own key or of the backend's set-up: never the same one again, but another one may do.
    "401": (refuse(401), True),
    "403": (refuse(403), True),
    "404": (refuse(404, code="model_not_found"), True),
    "408": (refuse(408), True),
    "429": (refuse(429), True),
    "429-with-retry-after": (refuse(429, more="retry-after: 9\r\n"), True),
    "500": (refuse(500), True),
    "502": (refuse(502), True),
    "503": (refuse(503), True),
    "504": (refuse(504), True),
    "529": (refuse(529), True),
    "never": (never, True),
    "closed": (closed, True),
    "cut": (cut, True),
    "cut-before-the-first-token": (cut_before_the_first_token, True),
    "error-event": (error_event, True),
    "after-the-first-token": (fails_in_mid_stream, False),
}


async def test_what_is_tried_elsewhere(site: Site) -> None:
    async def first(c: Conversation) -> None:
        await TABLE[c.body["model"]][0](c)

    one, other = await site.serve(first), await site.serve(answer)
    await site.pool("good")
    for number, name in enumerate(TABLE):
        await site.pool(f"pool-{number}")
        limit_s = 0.3 if name == "never" else 30.0
        await site.declare(f"first-{number}", f"pool-{number}", one.url, first_byte_timeout_s=limit_s)
        targets = [Target("good", name, priority=1)]
        await site.gateway.create_route(
            new_route(
                f"m{number}",
                pool=f"pool-{number}",
                backend_model=name,
                context_length=1000,
                unpriced="serve",
                more_targets=targets,
            )
        )
    await site.declare("good", "good", other.url)
    await site.known("good")

    async def case(number: int, name: str, elsewhere: bool) -> None:
        response = await site.ask(f"m{number}", stream="token" in name or "event" in name)
        row = await site.row(response)
        tried_first = 2 if name == "closed" else 1  # a connection that broke may have idled: the same one once more
        assert (asked(one, name), asked(other, name)) == (tried_first, int(elsewhere)), name
        assert row.attempts == tried_first + elsewhere, name
        assert [text.split()[0] for text in row.failed_attempts] == [f"first-{number}"] * tried_first, name
        assert row.status == ("ok" if elsewhere else "failed"), name
        if elsewhere:
            assert response.status_code == 200, name
            assert (response.headers["x-penstock-backend"], row.backend) == ("good", "good"), name
        elif name.isdigit():
            assert response.status_code == int(name), name
            assert response.json()["error"]["message"], name
        else:
            assert "[DONE]" not in response.text, name

    async with asyncio.TaskGroup() as tasks:
        for number, (name, (_, elsewhere)) in enumerate(TABLE.items()):
            tasks.create_task(case(number, name, elsewhere))


async def test_three_attempts_are_one_row_charged_once_and_many_dead_backends_do_not_hide_the_next_tier(
    site: Site,
) -> None:
    for pool in ("tier-1", "tier-2", "tier-3", "many"):
        await site.pool(pool)
    one, two, three = await site.serve(refuse(500)), await site.serve(never), await site.serve(answer)
    await site.declare("fails", "tier-1", one.url)
    await site.declare("silent", "tier-2", two.url, first_byte_timeout_s=0.2)
    await site.declare("good", "tier-3", three.url)
    await site.route("three", "tier-1", "tier-2", "tier-3")
    for number in range(8):
        await site.declare(f"gone-{number}", "many", f"http://127.0.0.1:{free_port()}")
    await site.route("tiers", "many", "tier-3")
    await site.known("many")

    response = await site.ask("three")
    assert response.status_code == 200, response.text
    assert response.headers["x-penstock-backend"] == "good"
    (row,) = await site.gateway.rows(1)
    assert (row.status, row.attempts, row.backend) == ("ok", 3, "good")
    assert row.failed_attempts == ["fails backend_error", "silent backend_timeout"]
    assert (row.prompt_tokens, row.completion_tokens, row.charged_nano_usd) == (9, 3, 9 * 1000 + 3 * 2000)
    assert response.headers["x-penstock-cost-usd"] == "0.000015000"

    for _ in range(4):
        response = await site.ask("tiers")
        assert response.status_code == 200, response.text
        assert response.headers["x-penstock-backend"] == "good"
    rows = (await site.gateway.rows(5))[1:]
    # Those of the first tier are tried three at a time, and each but once.
    assert max(row.attempts for row in rows) == 4
    assert sum(row.attempts - 1 for row in rows) <= 8


async def test_one_that_asks_to_be_left_alone_is_and_a_split_by_weight_reaches_both(site: Site) -> None:
    busy = await site.serve(refuse(429, more="retry-after: 20\r\n", code="rate_limit_exceeded"))
    most, few = await site.serve(answer), await site.serve(answer)
    for name, server in (("busy", busy), ("most", most), ("few", few)):
        await site.pool(name)
        await site.declare(name, name, server.url)
    await site.route("busy", "busy")
    await site.gateway.create_route(
        new_route(
            "split",
            pool="most",
            context_length=1000,
            unpriced="serve",
            weight=80,
            more_targets=[Target("few", "theirs", weight=20)],
        )
    )
    await site.known("most")

    first = await site.ask("busy")
    assert (first.status_code, first.headers["retry-after"]) == (429, "20")
    second = await site.ask("busy")
    assert (second.status_code, second.json()["error"]["code"]) == (503, "backends_busy")
    assert 10 <= int(second.headers["retry-after"]) <= 20
    assert asked(busy) == 1
    row = await site.row(second)
    assert (row.status, row.attempts, row.charged_nano_usd) == ("failed", 0, 0)

    responses = await asyncio.gather(*(site.ask("split") for _ in range(40)))
    assert all(response.status_code == 200 for response in responses)
    assert asked(most) + asked(few) == 40
    assert 1 <= asked(few, "theirs") == asked(few) <= 20
