"""What these tests share: connections, principals and scopes, and scripts' clocks that they set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.admission.redis import RedisClient, create_redis
from gateway.clock import SystemClock
from gateway.idempotency.scope import Scope, scope_of
from gateway.idempotency.service import Idempotency
from gateway.idempotency.store import SCRIPTS, Rules
from gateway.secret_key import SecretKey
from gateway.tenants.principal import Principal
from tests.gateway.admission.support import tenant

SECRET = SecretKey("secret-key-of-the-tests-of-this-room")
PATH = "/v1/chat/completions"


def connect(redis_url: str, *, timeout_s: float = 2.0) -> RedisClient:
    return create_redis(redis_url, timeout_s=timeout_s, scripts=SCRIPTS, name="penstock-idempotency")


def scope(principal: Principal | None = None, key: str = "k", body: bytes = b"{}", path: str = PATH) -> Scope:
    return scope_of(SECRET, principal or tenant(), path, key, body)


@asynccontextmanager
async def room(redis_url: str, rules: Rules | None = None, *, timeout_s: float = 2.0) -> AsyncIterator[Idempotency]:
    async with Idempotency(connect(redis_url, timeout_s=timeout_s), SECRET, SystemClock(), rules) as opened:
        yield opened


async def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)
