from __future__ import annotations

import asyncio
import json

from sqlalchemy import text

from gateway.admission.redis import create_redis
from gateway.billing.alert_stream import move_alerts
from gateway.clock import SystemClock
from gateway.db.engine import transaction
from gateway.ids import uuid7
from tests.gateway.cli.conftest import Penstock, ok, refused
from tests.gateway.db.support import opened


async def _cross(database_url: str, redis_url: str) -> None:
    async with opened(database_url, pool_size=1) as engine, transaction(engine) as connection:
        tenant_id = str(await connection.scalar(text("SELECT id FROM tenants")))
    alert = {"limit_id": str(uuid7()), "tenant_id": tenant_id, "subject": "model", "target": "m", "window": "day"}
    alert |= {"period_start_ms": 0, "threshold": 80, "spent": 8, "amount": 10, "at_ms": 0}  # type: ignore[dict-item]
    redis = create_redis(redis_url, timeout_s=5.0)
    await redis.command("XADD", "{s00}:alerts", "*", "alert", json.dumps(alert))
    async with opened(database_url, pool_size=1) as engine:
        await move_alerts(redis, engine, SystemClock().now())
    await redis.close()


def test_alerts_are_shown_and_sent_again(penstock: Penstock, database_url: str, redis_url: str) -> None:
    ok(penstock("tenant", "create", "acme"))
    assert "none" in ok(penstock("alert", "list"))
    asyncio.run(_cross(database_url, redis_url))
    head, line = ok(penstock("alert", "list", "--tenant", "acme")).splitlines()
    assert head.split()[0] == "ID"
    assert "model m day" in line
    assert "0.000000008" in line
    assert line.endswith("not sent: no webhook")
    alert_id = line.split()[0]
    refused(penstock("alert", "resend", alert_id), "--webhook-url")
    refused(penstock("alert", "resend", "nothing"), "nothing")
    refused(penstock("alert", "test", "acme"), "--webhook-url")
    ok(penstock("tenant", "set", "acme", "--webhook-url", "http://127.0.0.1:1/hook"))
    assert alert_id in ok(penstock("alert", "resend", alert_id))
    assert "next " in ok(penstock("alert", "list"))
    refused(penstock("alert", "test", "acme"), "could not be sent")
