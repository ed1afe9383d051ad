from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission import keys
from gateway.admission.redis import create_redis
from gateway.billing import alerts as module
from gateway.billing.alert_log import AlertRecord, UnknownAlert, list_alerts
from gateway.billing.alerts import MAX_ATTEMPTS, Alerts, NoWebhook, resend_alert, retry_after_s, send_test
from gateway.billing.usage import TokenUsage
from gateway.billing.webhook import NotDelivered, signature
from gateway.ids import uuid7
from gateway.secret_key import SecretKey
from gateway.tenants.directory import Directory, TenantChange, TenantSettings
from gateway.tenants.principal import shard_of
from tests.gateway.admission.support import Ledger, admission, limit, take, tenant
from tests.gateway.db.support import ManualClock
from tests.gateway.tenants.support import ACTOR

SECRET_KEY = SecretKey("secret-key-of-the-tests-of-the-alerts")
GOOD, BROKEN, MOVED, GONE = "204 No Content", "500 Oops", "302 Found\r\nlocation: /elsewhere", "410 Gone"


@dataclass
class Receiver:
    """A webhook on a real socket: answers with what ``script`` says, one after the other, then well. '': hangs."""

    script: list[str] = field(default_factory=list)
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.seen.append((first.split()[1], headers, body))
            answer = self.script.pop(0) if self.script else GOOD
            if not answer:
                await reader.read()  # until the sender gives up
                return
            # More than anyone should read.
            length = "" if answer == GOOD else "content-length: 1000000000\r\n"
            writer.write(f"HTTP/1.1 {answer}\r\n{length}connection: close\r\n\r\n".encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    server = await asyncio.start_server(receiver.connected, "127.0.0.1", 0)
    receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    yield receiver
    server.close()


@dataclass
class World:
    engine: AsyncEngine
    redis_url: str
    clock: ManualClock
    directory: Directory
    tenant_id: UUID
    secret: str

    def replica(self) -> Alerts:
        return Alerts(self.engine, self.redis_url, SECRET_KEY, self.clock, webhook_timeout_s=0.3)

    async def cross(self, **changes: Any) -> None:
        values = {
            "limit_id": str(UUID(int=5)),
            "tenant_id": str(self.tenant_id),
            "subject": "tenant",
            "target": "",
            "window": "month",
            "period_start_ms": 1_790_000_000_000,
            "threshold": 80,
            "spent": 8_100_000_000,
            "amount": 10_000_000_000,
            "at_ms": 1_790_000_500_000,
        }
        await self.write(json.dumps(values | changes))

    async def write(self, alert: str) -> None:
        redis = create_redis(self.redis_url, timeout_s=5.0)
        await redis.command("XADD", keys.alerts(shard_of(self.tenant_id)), "*", "alert", alert)
        await redis.close()

    async def waiting(self) -> int:
        redis = create_redis(self.redis_url, timeout_s=5.0)
        found = int(await redis.command("XLEN", keys.alerts(shard_of(self.tenant_id))))
        await redis.close()
        return found

    async def alerts(self) -> list[AlertRecord]:
        return await list_alerts(self.engine, limit=100)

    async def alert(self) -> AlertRecord:
        [only] = await self.alerts()
        return only


@pytest.fixture
async def world(engine: AsyncEngine, redis_url: str, clock: ManualClock, receiver: Receiver) -> World:
    directory = Directory(engine, clock, secret_key=SECRET_KEY)
    made = await directory.create_tenant(ACTOR, "acme", settings=TenantSettings(webhook_url=receiver.url))
    assert made.webhook_secret is not None
    return World(engine, redis_url, clock, directory, made.id, made.webhook_secret)


@pytest.fixture
async def sender(world: World) -> AsyncIterator[Alerts]:
    """Runs when the test tells it to."""
    made = world.replica()
    await made._webhooks.__aenter__()
    yield made
    await made._webhooks.__aexit__(None, None, None)
    await made._redis.close()


async def test_an_alert_is_sent_once_and_signed(world: World, sender: Alerts, receiver: Receiver) -> None:
    for _ in range(3):
        await world.cross()  # Redis told of it, was emptied, and told again
    await world.cross(threshold=100)
    assert await sender.run_once() == 2
    assert await sender.run_once() == 0
    assert await world.waiting() == 0
    assert [alert.delivered_at for alert in await world.alerts()] == [world.clock.now()] * 2

    assert len(receiver.seen) == 2
    for path, headers, body in receiver.seen:
        assert path == "/hook"
        # As any receiver would check it.
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(world.secret.removeprefix("whsec_"), validate=True)
        expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{expected}"
        assert abs(int(headers["webhook-timestamp"]) - world.clock.now().timestamp()) <= 1
    first = next(json.loads(body) for _, _, body in receiver.seen if b'"threshold_percent":80' in body)
    assert (first["type"], first["timestamp"]) == ("budget.threshold_crossed", "2026-09-21T14:21:40Z")
    assert first["data"]["tenant"] == "acme"
    assert (first["data"]["spent_usd"], first["data"]["amount_usd"]) == ("8.100000000", "10.000000000")
    assert {headers["webhook-id"] for _, headers, _ in receiver.seen} == {str(a.id) for a in await world.alerts()}


async def test_a_receiver_that_fails_hangs_or_redirects_is_asked_again(
    world: World, sender: Alerts, receiver: Receiver
) -> None:
    receiver.script = [BROKEN, "", MOVED, GOOD]
    await world.cross()
    for attempts, error in enumerate(("status 500", "no answer within 0.3 s", "status 302"), 1):
        assert await sender.run_once() == 1
        alert = await world.alert()
        assert (alert.attempts, alert.delivered_at) == (attempts, None)
        assert error in str(alert.last_error)
        assert await sender.run_once() == 0, "not before its time"
        assert alert.next_attempt_at is not None
        pause = (alert.next_attempt_at - world.clock.now()).total_seconds()
        assert 0.74 * 5 * 2 ** (attempts - 1) <= pause <= 5 * 2 ** (attempts - 1)
        world.clock.advance(pause)
    assert await sender.run_once() == 1
    alert = await world.alert()
    assert (alert.attempts, alert.last_error, alert.next_attempt_at) == (4, None, None)
    assert alert.delivered_at == world.clock.now()
    assert [path for path, _, _ in receiver.seen] == ["/hook"] * 4
    assert {headers["webhook-id"] for _, headers, _ in receiver.seen} == {str(alert.id)}


async def test_an_alert_is_given_up_after_a_day_and_can_be_sent_again(
    world: World, sender: Alerts, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 20 * 3600 < sum(retry_after_s(number, 0.0) for number in range(1, MAX_ATTEMPTS)) < 26 * 3600
    assert retry_after_s(MAX_ATTEMPTS, 1.0) == 2700
    monkeypatch.setattr(module, "MAX_ATTEMPTS", 2)
    receiver.script = [BROKEN, BROKEN]
    await world.cross()
    for _ in range(4):
        await sender.run_once()
        world.clock.advance(3600)
    alert = await world.alert()
    assert (alert.attempts, alert.delivered_at, alert.next_attempt_at) == (2, None, None)
    assert alert.given_up_at is not None
    assert "500" in str(alert.last_error)
    await resend_alert(world.engine, ACTOR, alert.id, world.clock.now())
    assert await sender.run_once() == 1
    assert (await world.alert()).delivered_at is not None
    assert (await world.directory.list_audit(kind="alert"))[0].action == "resend"
    with pytest.raises(UnknownAlert):
        await resend_alert(world.engine, ACTOR, uuid7(), world.clock.now())


async def test_a_receiver_that_is_gone_is_not_asked_again(world: World, sender: Alerts, receiver: Receiver) -> None:
    receiver.script = [GONE]
    await world.cross()
    assert await sender.run_once() == 1
    assert (await world.alert()).given_up_at == world.clock.now()


async def test_each_end_user_of_a_limit_is_told_of_apart(world: World, sender: Alerts, receiver: Receiver) -> None:
    for user in ("a" * 32, "b" * 32, "a" * 32):
        await world.cross(subject="end_user", target=user)
    assert await sender.run_once() == 2
    assert {alert.target for alert in await world.alerts()} == {"a" * 32, "b" * 32}


async def test_several_replicas_send_each_alert_once(world: World, receiver: Receiver) -> None:
    for threshold in range(1, 41):
        await world.cross(threshold=threshold)
    async with world.replica(), world.replica(), world.replica():
        async with asyncio.timeout(20):
            while len(receiver.seen) < 40 or any(a.delivered_at is None for a in await world.alerts()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    assert len(receiver.seen) == 40
    assert len({headers["webhook-id"] for _, headers, _ in receiver.seen}) == 40


async def test_another_replica_sends_what_one_that_died_had_claimed(
    world: World, sender: Alerts, receiver: Receiver
) -> None:
    await world.cross()
    await module.move_alerts(sender._redis, world.engine, world.clock.now())
    assert len(await sender._claim()) == 1
    assert await sender.run_once() == 0
    world.clock.advance(module.CLAIM_S)
    assert await sender.run_once() == 1
    assert (await world.alert()).attempts == 2


async def test_without_a_webhook_an_alert_is_kept_and_not_sent(
    world: World, sender: Alerts, receiver: Receiver
) -> None:
    await world.directory.update_tenant(ACTOR, "acme", TenantChange(webhook_url=None))
    await world.cross()
    assert await sender.run_once() == 0
    alert = await world.alert()
    assert (alert.next_attempt_at, alert.attempts) == (None, 0)
    with pytest.raises(NoWebhook):
        await resend_alert(world.engine, ACTOR, alert.id, world.clock.now())
    with pytest.raises(NoWebhook):
        await send_test(world.engine, SECRET_KEY, world.tenant_id, world.clock.now())


async def test_a_secret_that_cannot_be_opened_is_told(world: World, receiver: Receiver) -> None:
    other = Alerts(world.engine, world.redis_url, SecretKey("x" * 40), world.clock)
    await world.cross()
    async with other:
        async with asyncio.timeout(20):
            while not (found := await world.alerts()) or found[0].given_up_at is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    assert "PENSTOCK_SECRET_KEY" in str(found[0].last_error)
    assert receiver.seen == []


async def test_what_cannot_be_read_holds_nothing_up(world: World, sender: Alerts, receiver: Receiver) -> None:
    await world.write("\x00{what")
    await world.cross(tenant_id=str(uuid7()))
    await world.cross(target="a\0b", subject="end_user")
    assert await sender.run_once() == 1
    assert await world.waiting() == 0
    assert (await world.alert()).target == "a\N{REPLACEMENT CHARACTER}b"


async def test_a_test_message(world: World, receiver: Receiver) -> None:
    assert await send_test(world.engine, SECRET_KEY, world.tenant_id, world.clock.now()) == 204
    [(_, headers, body)] = receiver.seen
    assert json.loads(body)["type"] == "test"
    timestamp = int(headers["webhook-timestamp"])
    assert headers["webhook-signature"] == signature(world.secret, headers["webhook-id"], timestamp, body)
    receiver.script = [BROKEN]
    with pytest.raises(NotDelivered, match="500"):
        await send_test(world.engine, SECRET_KEY, world.tenant_id, world.clock.now() + timedelta(seconds=1))


def test_the_signature_of_the_specification() -> None:
    # The example that the Standard Webhooks specification gives.
    body = b'{"test": 2432232314}'
    found = signature("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert found == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    with pytest.raises(ValueError, match="whsec_"):
        signature("other", "m", 1, b"")


async def test_what_admission_tells_is_sent(world: World, sender: Alerts, receiver: Receiver) -> None:
    watched = limit("budget", 10_000, thresholds=(50, 80))
    principal = tenant(None, None, None, watched, tenant_id=world.tenant_id)
    async with admission(world.redis_url, Ledger(world.redis_url)) as gate:
        ticket = await take(gate, principal, 9_000)
        ticket.settle("ok", TokenUsage(1, 3))
        await ticket.settled()
    assert await sender.run_once() == 1
    alert = await world.alert()
    assert (alert.limit_id, alert.threshold, alert.window) == (watched.id, 50, "total")
    assert (alert.spent_nano_usd, alert.amount_nano_usd) == (7_000, 10_000)
    assert len(receiver.seen) == 1
