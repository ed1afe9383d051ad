"""What a client is told while something that the gateway itself needs is away."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.billing.ledger_sums import PostgresSums
from gateway.db.engine import DatabaseUnavailable
from tests.gateway.http.openai.test_chat import ASK, PATH, client_of, error_of, paris
from tests.gateway.tenants.support import budget


async def test_a_limit_that_cannot_be_counted_is_a_503_and_not_our_fault(
    start_gateway: Any, upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis lacks a budget, and Postgres, from which it would be built, went away after the key and route were read."""

    async def away(*_: Any, **__: Any) -> int:
        raise DatabaseUnavailable("the database does not answer; try again shortly")

    async with start_gateway(limits=[budget(10**9)]) as gateway, client_of(gateway) as client:
        await gateway.register(await upstream(paris))
        with monkeypatch.context() as patched:
            patched.setattr(PostgresSums, "charged", away)
            answer = await client.post(PATH, json=ASK)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "service_unavailable")
        assert answer.headers["retry-after"] == "1"
        assert (await client.post(PATH, json=ASK)).status_code == 200
        await gateway.rows(1)
