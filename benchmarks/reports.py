"""How long a month's report takes over a big ledger: ``python benchmarks/reports.py [--rows N] [--check]``.

Makes a ledger of three months in a Postgres of its own (rows by INSERT .. SELECT, rollups by the ledger's rule) and
asks for one month by each core dimension and by the days of two time zones, as the gateway does, answer read and all.
Beside it stands the floor: a plain ``count(*)`` over the same range of the rollups. Ten million rows take some minutes
to make; ``--data-dir`` keeps them for the next run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import package_first  # noqa: F401
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.ledger import ensure_partition
from gateway.billing.report_query import UsageQuery
from gateway.billing.reports import usage_report
from gateway.db.engine import create_engine, transaction
from gateway.db.migrate import upgrade
from gateway.local.services import EmbeddedPostgres

ROWS: Final = 10_000_000
BAR_S: Final = 1.0
"""Most seconds of a month's report by core dimensions, median of ROUNDS."""
ROUNDS: Final = 5
BEGIN: Final = datetime(2026, 8, 1, tzinfo=UTC)
MONTHS: Final = (BEGIN, datetime(2026, 9, 1, tzinfo=UTC), datetime(2026, 10, 1, tzinfo=UTC))
DAYS: Final = 92
BATCH: Final = 500_000

NAMES = """
INSERT INTO tenants (id, name, salt) SELECT md5('t' || t)::uuid, 'tenant-' || t, 's' FROM generate_series(0, 49) t;
INSERT INTO projects (id, tenant_id, name)
    SELECT md5('p' || p)::uuid, md5('t' || p % 50)::uuid, 'project-' || p FROM generate_series(0, 199) p;
INSERT INTO api_keys (public_id, tenant_id, project_id, name, secret_sha256, scopes)
    SELECT 'key' || lpad(k::text, 9, '0'), md5('t' || k % 200 % 50)::uuid, md5('p' || k % 200)::uuid, 'key ' || k,
        decode(repeat('00', 32), 'hex'), '{inference}'
    FROM generate_series(0, 499) k;
"""
# Few keys make most requests, each with a model or two of its own; two of four backends serve a model; days have a
# busy noon and a quiet night.
EVENTS = """
INSERT INTO usage_events (request_id, admitted_at, revision, tenant_id, project_id, key_id, route, backend, status,
    prompt_tokens, completion_tokens, cached_tokens, usage_source, charged_nano_usd, cost_nano_usd, over_bound,
    streamed, attempts, end_user, tags, cache_write_tokens, reasoning_tokens, images, compute_us)
SELECT uuidv7(at - now()), at, 1, md5('t' || key % 200 % 50)::uuid, md5('p' || key % 200)::uuid,
    'key' || lpad(key::text, 9, '0'), 'model-' || model,
    CASE WHEN status IN ('cache_hit', 'replayed') THEN NULL ELSE 'backend-' || (model + (r4 < 0.5)::int) % 4 END,
    status, prompt, completion, prompt / 4, 'backend', prompt * 150 + completion * 600, prompt * 100 + completion * 400,
    false, r4 < 0.7, 1, CASE WHEN r5 < 0.5 THEN md5('u' || (r5 * 10000)::int % 5000) END,
    CASE WHEN r5 > 0.7 THEN ARRAY['team=' || (r5 * 1000)::int % 20] ELSE '{}' END, 0, completion / 5, 0,
    completion * 9000
FROM (
    SELECT *, CASE WHEN r2 < 0.75 THEN key % 8 WHEN r2 < 0.95 THEN (key + 3) % 8 ELSE (r2 * 8000)::int % 8 END AS model,
        CASE WHEN r3 < 0.96 THEN 'ok' WHEN r3 < 0.98 THEN 'aborted' WHEN r3 < 0.99 THEN 'failed'
            WHEN r3 < 0.991 THEN 'abandoned' WHEN r3 < 0.996 THEN 'cache_hit' ELSE 'replayed' END AS status,
        (exp(4 + 3 * r1))::bigint AS prompt, (exp(3 + 3 * r4))::bigint AS completion
    FROM (
        SELECT (500 * power(random(), 3))::int % 500 AS key, random() AS r1, random() AS r2, random() AS r3,
            random() AS r4, random() AS r5,
            timestamptz '2026-08-01 00:00+00' + interval '1 day' * (
                floor(place) + (place - floor(place)) + 0.12 * sin(2 * pi() * (place - floor(place)))
            ) AS at
        FROM (SELECT i::double precision * :days / :rows AS place FROM generate_series(:first, :last) i) places
    ) draws
) drawn
"""
# In the order of time, in which a ledger grows.
ROLLUPS = """
INSERT INTO usage_rollup (bucket, tenant_id, project_id, key_id, route, backend, status, requests, prompt_tokens,
    completion_tokens, cached_tokens, cache_write_tokens, reasoning_tokens, images, compute_us, charged_nano_usd,
    cost_nano_usd)
SELECT date_bin('15 minutes', admitted_at, '2000-01-01 00:00+00'), tenant_id, project_id, key_id, route,
    coalesce(backend, ''), status, count(*), sum(prompt_tokens), sum(completion_tokens), sum(cached_tokens),
    sum(cache_write_tokens), sum(reasoning_tokens), sum(images), sum(compute_us), sum(charged_nano_usd),
    sum(cost_nano_usd)
FROM usage_events GROUP BY 1, 2, 3, 4, 5, 6, 7 ORDER BY 1
"""


@dataclass(frozen=True, slots=True)
class Result:
    report: str
    median_s: float
    worst_s: float
    rows: int
    bar_s: float | None


QUERIES: Final[dict[str, dict[str, Any]]] = {
    "total": {},
    "tenant": {"group_by": ["tenant"]},
    "project": {"group_by": ["project"]},
    "key": {"group_by": ["key"]},
    "model": {"group_by": ["model"]},
    "backend": {"group_by": ["backend"]},
    "status": {"group_by": ["status"]},
    "day, Europe/Berlin": {"group_by": ["day"], "timezone": "Europe/Berlin"},
    "day, Asia/Kathmandu": {"group_by": ["day"], "timezone": "Asia/Kathmandu"},
    "hour": {"group_by": ["hour"]},
    "one tenant by project, model, day": {"group_by": ["project", "model", "day"], "tenant": ["tenant-0"]},
    "ten dearest keys": {"group_by": ["key"], "order_by": "-charged", "limit": 10},
}
BEYOND: Final[dict[str, dict[str, Any]]] = {
    "tenant, key, model, backend, day": {"group_by": ["tenant", "key", "model", "backend", "day"], "limit": 1000},
    "three months by month": {"group_by": ["month"]},
    "one tenant by end user (rows)": {"group_by": ["end_user"], "tenant": ["tenant-0"], "limit": 1000},
    "one tenant by tag (rows)": {"group_by": ["tag"], "tenant": ["tenant-0"]},
}


async def fill(engine: AsyncEngine, rows: int) -> None:
    async with transaction(engine, timeout_s=60) as connection:
        for month in MONTHS:
            await ensure_partition(connection, month)
        for statement in NAMES.split(";\n"):
            if statement.strip():
                await connection.execute(text(statement))
    for first in range(0, rows, BATCH):
        async with transaction(engine, timeout_s=600) as connection:
            last = min(first + BATCH, rows) - 1
            await connection.execute(text(EVENTS), {"first": first, "last": last, "rows": rows, "days": DAYS})
        print(f"\r{last + 1:,} rows", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    async with transaction(engine, timeout_s=3600) as connection:
        await connection.execute(text(ROLLUPS))
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.execute(text("VACUUM ANALYZE"))


async def measure(name: str, work: Callable[[], Awaitable[int]], *, bar_s: float | None, rounds: int) -> Result:
    await work()
    times, rows = [], 0
    for _ in range(rounds):
        began = time.perf_counter()
        rows = await work()
        times.append(time.perf_counter() - began)
    return Result(name, statistics.median(times), max(times), rows, bar_s)


async def run(url: str, rows: int, rounds: int) -> tuple[dict[str, int], list[Result]]:
    engine = create_engine(url, pool_size=2)

    async def count(query: str, **parameters: Any) -> int:
        async with transaction(engine, timeout_s=60) as connection:
            return int(await connection.scalar(text(query), parameters) or 0)

    async def report(query: dict[str, Any], start: datetime, end: datetime) -> int:
        return len((await usage_report(engine, UsageQuery(start=start, end=end, **query))).rows)

    try:
        if await count("SELECT count(*) FROM tenants") == 0:
            await fill(engine, rows)
        start, end = MONTHS[1], MONTHS[2]
        floor = "SELECT count(*) FROM usage_rollup WHERE bucket >= :start AND bucket < :end"
        sizes = {
            "rows": await count("SELECT count(*) FROM usage_events"),
            "rollups": await count("SELECT count(*) FROM usage_rollup"),
            "rollups_of_the_month": await count(floor, start=start, end=end),
        }
        results = [
            await measure("floor: count(*)", lambda: count(floor, start=start, end=end), bar_s=None, rounds=rounds)
        ]
        for name, query in QUERIES.items():
            results.append(
                await measure(name, lambda query=query: report(query, start, end), bar_s=BAR_S, rounds=rounds)
            )
        for name, query in BEYOND.items():
            begin = BEGIN if name.startswith("three") else start
            finish = datetime(2026, 11, 1, tzinfo=UTC) if name.startswith("three") else end
            results.append(
                await measure(
                    name, lambda query=query, b=begin, e=finish: report(query, b, e), bar_s=None, rounds=rounds
                )
            )
    finally:
        await engine.dispose()
    return sizes, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help="of the ledger, over three months")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--data-dir", type=Path, help="keep the data here, and use it again")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help=f"fail unless each core report takes less than {BAR_S} s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-reports-") as folder:
        service = EmbeddedPostgres(options.data_dir or Path(folder), durable=False)
        url = service.start()
        try:
            upgrade(url)
            sizes, results = asyncio.run(run(url, options.rows, options.rounds))
        finally:
            service.stop(limit_s=60)
    if options.json:
        print(json.dumps(sizes | {"results": [asdict(result) for result in results]}, indent=2))
    else:
        print(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in sizes.items()))
        floor = results[0].median_s
        print(f"{'report of a month':<36} {'median s':>9} {'worst s':>9} {'x floor':>8} {'lines':>7} {'bar s':>6}")
        for result in results:
            bar = "" if result.bar_s is None else f"{result.bar_s:.1f}"
            print(
                f"{result.report:<36} {result.median_s:>9.3f} {result.worst_s:>9.3f} {result.median_s / floor:>8.1f} "
                f"{result.rows:>7,} {bar:>6}"
            )
    slow = [result.report for result in results if result.bar_s is not None and result.median_s >= result.bar_s]
    if options.check and slow:
        sys.exit(f"over the bar: {', '.join(slow)}")


if __name__ == "__main__":
    main()
