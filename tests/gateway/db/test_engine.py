from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DataError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import DatabaseUnavailable, psycopg_url, transaction
from gateway.local.services import EmbeddedPostgres
from tests.gateway.db.support import opened


@pytest.fixture
def own_postgres(services_dir: Path) -> Iterator[EmbeddedPostgres]:
    service = EmbeddedPostgres(services_dir, durable=False)
    service.start()
    yield service
    service.stop()


async def _one(engine: AsyncEngine, *, timeout_s: float = 0.5) -> int:
    async with transaction(engine, timeout_s=timeout_s) as connection:
        return int((await connection.execute(text("SELECT 1"))).scalar_one())


def _processes(root: int) -> list[int]:
    """``root`` and everything below it."""
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        found.append(queue.pop())
        queue += children.get(found[-1], [])
    return found


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_the_driver_is_named(scheme: str) -> None:
    url = psycopg_url(f"{scheme}://u:p%40ss@db.example:5433/name?sslmode=require")
    assert url.render_as_string(hide_password=False) == (
        "postgresql+psycopg://u:p%40ss@db.example:5433/name?sslmode=require"
    )


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "mysql://u:secret@h/d",
        "redis://:secret@h",
        "postgresql://u:p@secret@h/d",
        "postgresql://u:p@a/secret@h/d",
        "postgresql://u@h:secret/d",
        "postgresql://u:p@h/d?secret=1",
    ],
)
def test_other_urls_are_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(ValueError, match="postgresql://") as caught:
        psycopg_url(url)
    assert "secret" not in str(caught.value)


async def test_a_stopped_server_is_unavailable_and_found_again(own_postgres: EmbeddedPostgres) -> None:
    async with opened(own_postgres.url) as engine:
        assert await _one(engine) == 1
        own_postgres.stop()
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable):
                await _one(engine)
        own_postgres.start()
        assert await _one(engine, timeout_s=5) == 1


async def test_a_hanging_server_costs_no_more_than_the_time_limit(own_postgres: EmbeddedPostgres) -> None:
    assert own_postgres.process is not None
    async with opened(own_postgres.url, pool_size=3) as engine:
        await asyncio.gather(*(_one(engine, timeout_s=5) for _ in range(3)))
        processes = _processes(own_postgres.process.pid)
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            # Left to itself the driver would wait ten seconds more for a cancellation that nobody answers.
            async with asyncio.timeout(9):
                # The last one would have time for a long statement, but nobody is there to begin it.
                for limit_s in (0.5, 0.5, 60):
                    outcomes = await asyncio.gather(
                        *(_one(engine, timeout_s=limit_s) for _ in range(6)), return_exceptions=True
                    )
                    assert [type(outcome) for outcome in outcomes] == [DatabaseUnavailable] * 6
        finally:
            for process in processes:
                os.kill(process, signal.SIGCONT)
        # No connection of the pool is lost to those that were given up.
        assert await asyncio.gather(*(_one(engine, timeout_s=5) for _ in range(6))) == [1] * 6


async def test_a_cut_connection_is_unavailable_and_replaced(database_url: str) -> None:
    async with opened(database_url) as engine:
        with pytest.raises(DatabaseUnavailable):
            async with transaction(engine) as connection:
                await connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        assert await _one(engine, timeout_s=5) == 1


async def test_a_slow_statement_is_unavailable_and_rolled_back(database_url: str) -> None:
    async with opened(database_url, pool_size=1) as engine:

        async def write_slowly() -> None:
            async with transaction(engine, timeout_s=0.3) as connection:
                await connection.execute(text("INSERT INTO pools (name) VALUES ('p')"))
                await connection.execute(text("SELECT pg_sleep(30)"))

        with pytest.raises(DatabaseUnavailable):
            await write_slowly()
        async with transaction(engine, timeout_s=5) as connection:
            assert (await connection.execute(text("SELECT count(*) FROM pools"))).scalar_one() == 0


async def test_a_statement_that_was_given_up_does_not_run_on_in_postgres(database_url: str) -> None:
    running = text("SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(301)' AND state = 'active'")
    async with opened(database_url) as engine:

        async def sleep() -> None:
            async with transaction(engine, timeout_s=0.3) as connection:
                await connection.execute(text("SELECT pg_sleep(301)"))

        with pytest.raises(DatabaseUnavailable):
            await sleep()
        async with asyncio.timeout(30), engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            while await connection.scalar(running):  # noqa: ASYNC110 - Postgres tells no event
                await asyncio.sleep(0.05)


async def test_a_cancelled_caller_is_cancelled_not_unavailable(database_url: str) -> None:
    async with opened(database_url, pool_size=1) as engine:

        async def sleep() -> None:
            async with transaction(engine, timeout_s=30) as connection:
                await connection.execute(text("SELECT pg_sleep(30)"))

        async with asyncio.TaskGroup() as tasks:
            sleeper = tasks.create_task(sleep())
            await asyncio.sleep(0.2)
            sleeper.cancel()
        assert sleeper.cancelled()
        assert await _one(engine, timeout_s=5) == 1


async def test_faults_of_the_data_pass_as_they_are(database_url: str) -> None:
    async with opened(database_url) as engine:
        with pytest.raises(DataError):
            async with transaction(engine) as connection:
                await connection.execute(text("SELECT 1 / 0"))
        with pytest.raises(OperationalError):
            async with transaction(engine) as connection:
                # Longer than an index entry may be.
                await connection.execute(
                    text("INSERT INTO pools SELECT string_agg(md5(n::text), '') FROM generate_series(1, 500) AS n")
                )


async def test_sessions_run_in_utc(database_url: str) -> None:
    async with opened(database_url) as engine, transaction(engine) as connection:
        assert (await connection.execute(text("SHOW timezone"))).scalar_one() == "UTC"
