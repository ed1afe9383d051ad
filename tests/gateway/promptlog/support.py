"""A prompt log on a real Redis and Postgres, and entries for it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.redis import RedisClient, create_redis
from gateway.clock import Clock, SystemClock
from gateway.datakeys.master_keys import MasterKeys
from gateway.datakeys.service import DataKeys
from gateway.ids import uuid7
from gateway.policies.prompt_log import CustomPattern, PromptLogPolicy
from gateway.promptlog.entry import Entry
from gateway.promptlog.log import PromptLog
from gateway.promptlog.reader import Reader
from gateway.promptlog.store import Store
from tests.gateway.datakeys.support import MASTER_KEYS

FULL = PromptLogPolicy(level="full")
REDACTED = PromptLogPolicy(level="redacted")
METADATA = PromptLogPolicy(level="metadata")
PROJECT = UUID("00000000-0000-7000-8000-00000000000a")
ANN, BOB = "a" * 32, "b" * 32
"""Hashes of end users."""


class Digits:
    """A redactor that blacks out runs of digits, and its tenant's patterns."""

    def __init__(self, patterns: tuple[CustomPattern, ...]) -> None:
        self._patterns = [(re.compile(each.regex), f"[{each.name.upper()}]") for each in patterns]

    def text(self, text: str, /) -> str:
        if "explode" in text:
            raise ValueError(text)
        for pattern, instead in self._patterns:
            text = pattern.sub(instead, text)
        return re.sub(r"[0-9]{4,}", "[DIGITS]", text)

    def json(self, body: bytes, /) -> bytes:
        return self.text(body.decode(errors="replace")).encode()


def body(text: str, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()


def answer(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def entry(tenant_id: UUID, text: str = "What is the capital of France?", **changes: Any) -> Entry:
    told: dict[str, Any] = {
        "request_id": uuid7(),
        "admitted_at": datetime.now(UTC),
        "tenant_id": tenant_id,
        "project_id": PROJECT,
        "key_id": "pk1",
        "api": "chat_completions",
        "model": "m",
        "backend": "worker-1",
        "status": "ok",
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "charged_nano_usd": 1200,
        "first_token_ms": 20,
        "total_ms": 90,
        "tags": ("team-red",),
        "request": body(text),
        "response": answer(f"You asked: {text}"),
    }
    return Entry(**told | changes)


@dataclass
class Rig:
    """One replica's prompt log."""

    url: str
    engine: AsyncEngine
    data_keys: DataKeys
    log: PromptLog
    reader: Reader
    store: Store
    redis: RedisClient
    lost: Counter[str] = field(default_factory=Counter)

    async def write(self, *entries: Entry, policy: PromptLogPolicy = FULL) -> None:
        for each in entries:
            self.log.record(policy, each)
        await self.log.flush()


@asynccontextmanager
async def rig(
    url: str,
    engine: AsyncEngine,
    *,
    clock: Clock | None = None,
    timeout_s: float = 5.0,
    master_keys: MasterKeys = MASTER_KEYS,
) -> AsyncIterator[Rig]:
    lost: Counter[str] = Counter()
    clock = clock or SystemClock()
    async with AsyncExitStack() as stack:
        redis = create_redis(url, timeout_s=5.0)
        stack.push_async_callback(redis.close)
        data_keys = await stack.enter_async_context(DataKeys(engine, master_keys, clock))
        log = PromptLog(
            create_redis(url, timeout_s=timeout_s),
            data_keys,
            clock,
            Digits,
            lost=lambda reason, count: lost.update({reason: count}),
        )
        await stack.enter_async_context(log)
        yield Rig(url, engine, data_keys, log, Reader(redis, data_keys, clock, Digits), Store(redis), redis, lost)


async def account(rig: Rig, tenant_id: UUID) -> tuple[int, int]:
    """Bytes as counted, and as they are."""
    rows = await rig.store.rows(tenant_id, count=100_000)
    total = 0
    for row in rows:
        fields = await hash_of(rig, tenant_id, row.request_id)
        sealed = sum(len(fields.get(name, b"")) for name in (b"q", b"a", b"f"))
        total += len(row.metadata) + sealed + 512
    return await rig.store.bytes_of(tenant_id), total


async def hash_of(rig: Rig, tenant_id: UUID, request_id: UUID) -> Mapping[bytes, bytes]:
    flat = await rig.redis.command("HGETALL", f"pl:{tenant_id}:e:{request_id}")
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def names(rig: Rig, pattern: str = "pl:*") -> set[str]:
    return {name.decode() for name in await rig.redis.command("KEYS", pattern)}
