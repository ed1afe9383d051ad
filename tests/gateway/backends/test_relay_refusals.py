"""Answers of backends that are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.backends.faults import BackendError
from tests.gateway.backends.relay_support import (
    Rig,
    read_until_fault,
)


async def test_429_is_passed_on_with_its_retry_after_when_no_backend_is_left(rig: Rig, upstream: Any) -> None:
    body = b'{"error":{"message":"busy","type":"rate_limit_error","param":null,"code":"queue_full"}}'

    async def busy(c: Any) -> None:
        await c.status(429, body, more="retry-after: 7\r\n")

    one, two = await upstream(busy), await upstream(busy)
    rig.use(one.url, two.url)
    exchange = rig.open()
    _, fault = await read_until_fault(exchange)
    assert exchange.attempts == 2
    error = fault.error()
    assert (error.status, error.encode(), error.headers) == (429, body, {"retry-after": "7"})
    assert fault.code == "queue_full"


async def test_a_bad_request_is_passed_on_as_it_is_and_not_repeated(rig: Rig, upstream: Any) -> None:
    body = b'{"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}}'

    async def refuses(c: Any) -> None:
        await c.status(400, body)

    server = await upstream(refuses)
    rig.use(server.url, server.url)
    _, fault = await read_until_fault(rig.open())
    assert isinstance(fault, BackendError)
    assert (fault.error().status, fault.error().encode()) == (400, body)
    assert len(server.seen) == 1


async def test_a_retry_after_that_no_header_can_bear_is_left_out(rig: Rig, upstream: Any) -> None:
    async def busy(c: Any) -> None:
        await c.status(
            503, b'{"error":{"message":"busy","code":"engine_overloaded"}}', more="retry-after: sp\xe4ter\r\n"
        )

    rig.use((await upstream(busy)).url)
    _, fault = await read_until_fault(rig.open())
    assert (fault.error().status, fault.error().headers) == (503, {})


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refusal_of_the_gateway_itself_is_not_shown_to_the_client(rig: Rig, upstream: Any, status: int) -> None:
    async def refuses(c: Any) -> None:
        await c.status(status, b'{"error":{"message":"bad fleet token","type":"authentication_error","code":"x"}}')

    server = await upstream(refuses)
    rig.use(server.url, server.url)
    _, fault = await read_until_fault(rig.open())
    assert fault.error().status == 502
    assert b"fleet" not in fault.error().encode()
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("status", "body", "media_type"),
    [
        (500, b"<html>nginx secret page</html>", "text/html"),
        (502, b"", "text/plain"),
        (400, b"<html>nginx secret page</html>", "text/html"),
        (418, b'{"detail":"nginx secret page"}', "application/json"),
        (302, b"nginx secret page", "text/plain"),
        (200, b"<html>nginx secret page</html>", "text/html"),
        (500, b"nginx secret page" * 10_000, "text/plain"),
    ],
)
async def test_pages_that_are_no_answer_become_a_clear_error(
    rig: Rig, upstream: Any, status: int, body: bytes, media_type: str
) -> None:
    async def page(c: Any) -> None:
        await c.status(status, body, media_type=media_type)

    rig.use((await upstream(page)).url)
    _, fault = await read_until_fault(rig.open())
    assert fault.error().status == 502
    told = json.loads(fault.error().encode())["error"]
    assert told["type"] == "server_error"
    assert "secret" not in told["message"]


async def test_garbage_instead_of_http_is_a_fault(rig: Rig, upstream: Any) -> None:
    async def garbage(c: Any) -> None:
        await c.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

    rig.use((await upstream(garbage)).url)
    _, fault = await read_until_fault(rig.open())
    assert fault.error().status == 502
