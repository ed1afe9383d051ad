"""Tells tenants' webhooks of crossed thresholds: again and again for a day, then the alert is given up, and shown so.

Any replica may send an alert. It is claimed first, for longer than sending may take; should its replica die meanwhile,
another sends it when the claim has run out. So a message may come twice, in rare cases: its id is the same then.
"""

from __future__ import annotations

import asyncio
import random
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.redis import RedisError, RedisUnavailable, create_redis
from gateway.billing.alert_log import AlertRecord, UnknownAlert, find_alert
from gateway.billing.alert_stream import move_alerts
from gateway.billing.usage import usd_text
from gateway.billing.webhook import TIMEOUT_S, NotDelivered, Webhooks
from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable, transaction
from gateway.db.tables import alerts, tenants
from gateway.ids import uuid7
from gateway.secret_key import SealBroken, SecretKey
from gateway.tenants.audit import Actor, audit
from gateway.tenants.changes import find_tenant
from gateway.tenants.records import StateConflict
from gateway.tenants.tenant_changes import unseal_webhook_secret

CLAIM_S = 60.0
AT_ONCE = 10
FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 3600.0
MAX_ATTEMPTS = 33
"""About a day: doubling from 5 s to an hour takes ten, and then there is one each hour."""
_CLOSE_LIMIT_S = 2.0
_MAX_PAUSE_S = 10.0
_log = structlog.get_logger(__name__)


class NoWebhook(StateConflict):
    def __init__(self, tenant: str) -> None:
        super().__init__(f"the tenant has no webhook; set one: penstock tenant set {tenant} --webhook-url URL")


def retry_after_s(attempts: int, jitter: float) -> float:
    """Seconds until the next attempt, after so many; ``jitter`` from 0 to 1 takes up to a quarter off."""
    return min(FIRST_RETRY_S * 2.0 ** min(attempts - 1, 20), LONGEST_RETRY_S) * (1 - jitter / 4)


class Alerts:
    """Moves crossed thresholds into Postgres and sends them, in the background, from ``async with`` on."""

    def __init__(
        self,
        engine: AsyncEngine,
        redis_url: str,
        secret_key: SecretKey,
        clock: Clock,
        *,
        interval_s: float = 1.0,
        redis_timeout_s: float = 2.0,
        webhook_timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._engine = engine
        self._secret_key = secret_key
        self._clock = clock
        self._interval_s = interval_s
        self._redis = create_redis(redis_url, timeout_s=redis_timeout_s, name="penstock-alerts")
        self._webhooks = Webhooks(timeout_s=webhook_timeout_s)
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Alerts:
        await self._webhooks.__aenter__()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="alerts")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._task is not None:
            _, late = await asyncio.wait([self._task], timeout=_CLOSE_LIMIT_S)
            for task in late:  # its claims run out, and another replica sends them
                task.cancel()
                await asyncio.wait([task])
        await self._webhooks.__aexit__(kind, fault, trace)
        await self._redis.close()

    async def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                await self.run_once()
                failures = 0
            except (DatabaseUnavailable, RedisUnavailable, RedisError) as fault:
                failures += 1
                if failures == 1:
                    _log.warning("alerts_wait", error=repr(fault))
            except Exception:
                failures += 1
                _log.exception("alerts_failed")
            try:
                async with asyncio.timeout(min(self._interval_s * 2 ** min(failures, 8), _MAX_PAUSE_S)):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def run_once(self) -> int:
        """Move what waits and send what is due; returns how many were sent, with success or without.

        Raises RedisUnavailable, RedisError, DatabaseUnavailable.
        """
        await move_alerts(self._redis, self._engine, self._clock.now())
        sent = 0
        while not self._stopping.is_set() and (claimed := await self._claim()):
            await asyncio.gather(*map(self._send, claimed))
            sent += len(claimed)
        return sent

    async def _claim(self) -> list[AlertRecord]:
        now = self._clock.now()
        due = (
            select(alerts.c.id)
            .where(alerts.c.next_attempt_at <= now)
            .order_by(alerts.c.next_attempt_at)
            .limit(AT_ONCE)
            .with_for_update(skip_locked=True)
        )
        claim = (
            update(alerts)
            .where(alerts.c.id.in_(due.scalar_subquery()))
            .values(attempts=alerts.c.attempts + 1, next_attempt_at=now + timedelta(seconds=CLAIM_S))
            .returning(*(alerts.c[name] for name in AlertRecord.__slots__))
        )
        async with transaction(self._engine) as connection:
            return [AlertRecord(**row._mapping) for row in await connection.execute(claim)]

    async def _send(self, alert: AlertRecord) -> None:
        values: dict[str, Any]
        try:
            name, url, secret = await _webhook(self._engine, self._secret_key, alert.tenant_id)
            body = message("budget.threshold_crossed", alert.crossed_at, _told(alert, name))
            await self._webhooks.send(url, secret, str(alert.id), self._now_s(), body)
            values = {"delivered_at": self._clock.now(), "next_attempt_at": None, "last_error": None}
        except (NotDelivered, NoWebhook, SealBroken, ValueError) as fault:  # ValueError: the secret is none
            values = self._after_failure(alert, fault)
        # Unless the claim ran out, and another has it.
        mine = (alerts.c.id == alert.id) & (alerts.c.attempts == alert.attempts)
        async with transaction(self._engine) as connection:
            await connection.execute(update(alerts).where(mine).values(values))

    def _after_failure(self, alert: AlertRecord, fault: Exception) -> dict[str, Any]:
        now = self._clock.now()
        final = not isinstance(fault, NotDelivered) or fault.final or alert.attempts >= MAX_ATTEMPTS
        _log.warning("alert_not_delivered", alert=str(alert.id), attempts=alert.attempts, final=final, error=str(fault))
        if final:
            return {"given_up_at": now, "next_attempt_at": None, "last_error": str(fault)}
        pause = timedelta(seconds=retry_after_s(alert.attempts, random.random()))
        return {"next_attempt_at": now + pause, "last_error": str(fault)}

    def _now_s(self) -> int:
        return int(self._clock.now().timestamp())


async def resend_alert(engine: AsyncEngine, actor: Actor, alert_id: UUID, now: datetime) -> AlertRecord:
    """Send it once more, whatever became of it: some replica does within seconds.

    Raises UnknownAlert, NoWebhook, NotAllowed, DatabaseUnavailable.
    """
    actor.check_may_change()
    alert = await find_alert(engine, alert_id)
    async with transaction(engine) as connection:
        tenant = await find_tenant(connection, str(alert.tenant_id))
        if tenant.webhook_url is None:
            raise NoWebhook(tenant.name)
        again = update(alerts).where(alerts.c.id == alert_id)
        values = {"attempts": 0, "next_attempt_at": now, "delivered_at": None, "given_up_at": None}
        if (await connection.execute(again.values(values))).rowcount == 0:
            raise UnknownAlert(str(alert_id))
        await audit(connection, actor, "resend", "alert", str(alert_id), tenant_id=tenant.id)
    return alert


async def send_test(engine: AsyncEngine, secret_key: SecretKey, tenant_id: UUID, now: datetime) -> int:
    """Send the tenant's webhook a message of type ``test`` at once; returns the status with which it was taken.

    Raises NotDelivered, NoWebhook, SealBroken, DatabaseUnavailable.
    """
    name, url, secret = await _webhook(engine, secret_key, tenant_id)
    async with Webhooks() as webhooks:
        body = message("test", now, {"tenant_id": tenant_id, "tenant": name})
        return await webhooks.send(url, secret, str(uuid7()), int(now.timestamp()), body)


def message(kind: str, at: datetime, data: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"type": kind, "timestamp": at, "data": data})


def _told(alert: AlertRecord, tenant: str) -> dict[str, Any]:
    return {
        "alert_id": alert.id,
        "tenant_id": alert.tenant_id,
        "tenant": tenant,
        "limit_id": alert.limit_id,
        "subject": alert.subject,
        "target": alert.target,
        "period": alert.window,
        "period_start": alert.period_start,
        "threshold_percent": alert.threshold,
        "spent_usd": usd_text(alert.spent_nano_usd),
        "amount_usd": usd_text(alert.amount_nano_usd),
    }


async def _webhook(engine: AsyncEngine, secret_key: SecretKey, tenant_id: UUID) -> tuple[str, str, str]:
    """Name of the tenant, address and secret of its webhook."""
    query = select(tenants.c.name, tenants.c.webhook_url, tenants.c.webhook_secret).where(tenants.c.id == tenant_id)
    async with transaction(engine) as connection:
        row = (await connection.execute(query)).one_or_none()
    if row is None or row.webhook_url is None or row.webhook_secret is None:
        raise NoWebhook(row.name if row else str(tenant_id))
    return row.name, row.webhook_url, unseal_webhook_secret(secret_key, tenant_id, row.webhook_secret)
