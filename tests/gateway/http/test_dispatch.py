from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.http.dispatch import Dispatch
from gateway.http.draining import Drain


async def answered_by(drain: Drain, **changes: Any) -> str:
    answered: list[str] = []

    async def app(*_: Any) -> None:
        answered.append("app")

    async def door(*_: Any) -> None:
        answered.append("door")

    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": [(b"host", b"[::1]:80")]} | changes
    nothing: Any = None
    dispatch: Any = Dispatch(app, {"/v1/messages": lambda: door}, drain)
    await dispatch(scope, nothing, nothing)
    (name,) = answered
    return name


async def test_a_plain_request_goes_straight_to_its_door() -> None:
    assert await answered_by(Drain()) == "door"
    assert await answered_by(Drain(), headers=[]) == "door"


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "websocket"},
        {"method": "GET"},
        {"path": "/v1/messages/"},
        {"path": "/v1/models"},
        {"headers": [(b"host", b"a/b")]},
        {"headers": [(b"host", b"a"), (b"host", b"a\nb")]},
    ],
    ids=str,
)
async def test_all_else_goes_to_the_application(changes: dict[str, Any]) -> None:
    assert await answered_by(Drain(), **changes) == "app"


async def test_a_gateway_that_stops_refuses_as_the_application_does() -> None:
    drain = Drain()
    drain.begin()
    assert await answered_by(drain) == "app"


async def test_a_stop_waits_for_what_a_door_answers() -> None:
    drain, goes_on = Drain(), asyncio.Event()

    async def door(*_: Any) -> None:
        await goes_on.wait()

    nothing: Any = None
    dispatch: Any = Dispatch(nothing, {"/v1/messages": lambda: door}, drain)
    scope: Any = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": []}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(dispatch(scope, nothing, nothing))
        await asyncio.sleep(0)
        ended = tasks.create_task(drain.ended())
        await asyncio.sleep(0.01)
        assert not ended.done()
        goes_on.set()
