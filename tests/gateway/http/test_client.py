from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.http.client import Client, ClientGone


@pytest.mark.parametrize("fault", [ConnectionResetError(104, "reset"), RuntimeError("the handler is closed")])
async def test_sending_on_a_closed_connection_is_the_client_leaving(fault: Exception) -> None:
    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(_: Any) -> None:
        raise fault

    client = Client({"headers": []}, receive, send)  # type: ignore[typeddict-item, arg-type, unused-ignore]
    left: list[bool] = []
    with client.watched(lambda: left.append(True), at_most_s=60):
        with pytest.raises(ClientGone):
            await client.start(200, [])
        with pytest.raises(ClientGone):
            await client.write(b"x")
        with pytest.raises(ClientGone):
            await client.end()
    assert len(left) == 3
