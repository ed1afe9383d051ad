"""What an admission and its settlement cost the gateway: ``python benchmarks/admission.py [--check]``.

One tenant with eight limits (requests and tokens per minute, hour and day, slots, a budget), on a real Redis: an
embedded one, or the one that ``--redis`` names, in which the tenants stay. At 1 and at 64 requests at a time: CPU time
of this process for an admission and its settlement, and how often Redis was asked. The same is done through redis-py's
asyncio client, for comparison, by the same code but for the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import package_first  # noqa: F401
import redis
import redis.asyncio

from gateway.admission.redis import Argument, RedisClient, Script
from gateway.admission.service import Admission
from gateway.admission.ticket import Bound, Draft
from gateway.billing.prices import Price, Tariff
from gateway.billing.usage import TokenUsage
from gateway.clock import SystemClock
from gateway.ids import uuid7
from gateway.local.services import EmbeddedRedis
from gateway.tenants.principal import Limit, Principal

MOST: Final = 2**50
LIMITS: Final = (
    Limit(uuid7(), "tenant", "", "budget", "month", MOST, thresholds=(80, 100)),
    Limit(uuid7(), "tenant", "", "requests", "minute", MOST),
    Limit(uuid7(), "tenant", "", "requests", "day", MOST),
    Limit(uuid7(), "tenant", "", "tokens", "minute", MOST),
    Limit(uuid7(), "key", "key", "tokens", "hour", MOST),
    Limit(uuid7(), "model", "model", "tokens", "day", MOST),
    Limit(uuid7(), "end_user", "", "requests", "hour", MOST),
    Limit(uuid7(), "tenant", "", "concurrent", None, MOST),
)
PRICE: Final = Price(uuid7(), "model", Decimal("0.15"), Decimal("0.6"), datetime(2026, 1, 1, tzinfo=UTC))
DRAFT: Final = Draft("model", Tariff(PRICE, PRICE), end_user="0123456789abcdef0123456789abcdef", tags=("team=a",))
BOUND: Final = Bound(5_000_000, 3_000)
USAGE: Final = TokenUsage(812, 164)
ROUND_TRIPS_BAR: Final = 2.0
CPU_BAR_MS: Final = 0.10
BAR_AT: Final = 64


@dataclass(frozen=True, slots=True)
class Row:
    client: str
    concurrent: int
    requests: int
    cpu_ms: float
    """Of this process, an admission and its settlement together; the best round."""
    wall_ms: float
    """Of the same round, over all requests."""
    round_trips: float
    redis_cpu_ms: float
    """Of Redis, an admission and its settlement together."""


class NoSums:
    """A ledger without rows."""

    async def charged(self, *_: Any, **__: Any) -> int:
        return 0

    async def used(self, *_: Any, **__: Any) -> Sequence[tuple[int, int, int]]:
        return ()


class PlainRedis(RedisClient):
    """redis-py's asyncio client behind the methods that admission calls."""

    def __init__(self, url: str) -> None:
        super().__init__(5.0)
        self._client = redis.asyncio.Redis.from_url(url, max_connections=128)

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._client.evalsha(script.sha.decode(), len(keys), *keys, *arguments))

    async def command(self, *arguments: Argument) -> Any:
        execute: Any = self._client.execute_command
        return await execute(*arguments)

    def _submit(self, key: Argument | None, packed: bytes, whole: Callable[[], bytes] | None) -> asyncio.Future[Any]:
        raise NotImplementedError

    async def flushed(self, key: str) -> bool:
        return False

    async def close(self) -> None:
        await self._client.aclose()


async def requests(gate: Admission, principal: Principal, count: int) -> None:
    for _ in range(count):
        ticket = await gate.admit(uuid7(), principal, draft=DRAFT, bound=BOUND)
        ticket.settle("ok", USAGE, backend="worker-1", first_token_ms=210)
        await ticket.settled()


async def measure(url: str, plain: bool, concurrent: int, count: int, rounds: int) -> Row:
    principal = Principal(
        uuid7(),
        "acme",
        "key",
        frozenset({"inference"}),
        1,
        "salt",
        tenant_limits=LIMITS,
        project_id=UUID(int=7),
    )
    gate = Admission(url, SystemClock(), lease_s=600, renewal_s=300, timeout_s=5, ledger=NoSums())
    await gate.start()
    await requests(gate, principal, 50)  # counters built, code warm, scripts known to Redis
    client: RedisClient | None = None
    if plain:
        client = PlainRedis(url)
        gate._redis = gate._settlements._redis = client
        await asyncio.gather(*(requests(gate, principal, 2) for _ in range(concurrent)))
    best = Row("", 0, 0, float("inf"), 0, 0, 0)
    with redis.Redis.from_url(url) as seen:
        for _ in range(rounds):
            seen.config_resetstat()
            before = seen.info("cpu")
            began, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(requests(gate, principal, count // concurrent) for _ in range(concurrent)))
            spent, wall = time.process_time() - cpu, time.perf_counter() - began
            after, calls = seen.info("cpu"), seen.info("commandstats")
            done = count // concurrent * concurrent
            row = Row(
                "redis-py" if plain else "pipelined",
                concurrent,
                done,
                1000 * spent / done,
                1000 * wall / done,
                calls["cmdstat_evalsha"]["calls"] / done,
                1000 * sum(after[name] - before[name] for name in ("used_cpu_user", "used_cpu_sys")) / done,
            )
            best = min(best, row, key=lambda each: each.cpu_ms)
    await gate.close()
    if client is not None:
        await client.close()
    return best


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        service = EmbeddedRedis(Path(folder) / "redis", durable=False)
        try:
            yield service.start()
        finally:
            service.stop()


def missed_bars(rows: list[Row]) -> list[str]:
    missed = []
    for row in rows:
        if row.client != "pipelined":
            continue
        if row.round_trips > ROUND_TRIPS_BAR * 1.001:
            missed.append(
                f"{row.concurrent} at a time: {row.round_trips:.3f} round trips, at most {ROUND_TRIPS_BAR:.0f}"
            )
        if row.concurrent == BAR_AT and row.cpu_ms > CPU_BAR_MS:
            missed.append(f"{row.concurrent} at a time: {row.cpu_ms:.4f} ms of CPU, at most {CPU_BAR_MS:.2f} ms")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--redis", metavar="URL", help="a running Redis, rather than an embedded one")
    parser.add_argument("--requests", type=int, default=4000, help="a round")
    parser.add_argument("--rounds", type=int, default=5, help="of which the best counts")
    parser.add_argument("--json", action="store_true", help="print JSON to stdout instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with server(options.redis) as url:
        rows = [
            asyncio.run(measure(url, plain, concurrent, options.requests, options.rounds))
            for plain in (False, True)
            for concurrent in (1, BAR_AT)
        ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(f"Admit and settle under {len(LIMITS)} limits; ms a request:")
        print(f"{'client':>10} {'at a time':>10} {'gateway CPU':>12} {'wall':>8} {'Redis CPU':>10} {'round trips':>12}")
        for row in rows:
            print(
                f"{row.client:>10} {row.concurrent:10} {row.cpu_ms:12.4f} {row.wall_ms:8.4f} {row.redis_cpu_ms:10.4f} "
                f"{row.round_trips:12.3f}"
            )
        print(f"Bars: {ROUND_TRIPS_BAR:.0f} round trips; {CPU_BAR_MS:.2f} ms of gateway CPU at {BAR_AT} at a time")
    missed = missed_bars(rows)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    if options.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
