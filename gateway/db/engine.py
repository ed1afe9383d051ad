"""Connections to Postgres: a pool that fails fast when the server is away and heals by itself when it is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar
from uuid import UUID

from psycopg import AsyncConnection as PsycopgConnection
from psycopg import ProgrammingError
from psycopg.abc import PQGen
from psycopg.conninfo import make_conninfo
from psycopg.waiting import wait_async
from sqlalchemy import exc, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

CONNECT_TIMEOUT_S = 2
CHECK_INTERVAL_MS = 1000
READ_TIMEOUT_S = 2.0
"""How long a request waits for Postgres before it is told that Postgres is away."""


class DatabaseUnavailable(Exception):
    """Postgres did not answer in time or refused the connection. Callers answer 503 and ask to retry."""


T = TypeVar("T")


class _PromptConnection(PsycopgConnection[Any]):
    """A connection that is closed when a wait on it is cancelled.

    psycopg would first ask the server to cancel the query and wait for that, up to ten seconds when the server hangs:
    longer than anyone who gave a time limit wants to wait. The pool replaces a closed connection.
    """

    async def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        try:
            return await wait_async(gen, self.pgconn.socket, interval=interval, timeout=timeout)
        except asyncio.CancelledError:
            self.pgconn.finish()
            raise


def psycopg_url(url: str) -> URL:
    """``url`` with the psycopg driver named: ``postgresql://`` and ``postgres://`` become ``postgresql+psycopg://``.

    Raises ValueError for anything that is not a Postgres URL.
    """
    try:
        parsed = make_url(url)
        if "@" in f"{parsed.host}{parsed.database}":
            raise ValueError("a part of the password is taken for the host")
        make_conninfo(**{name: str(value) for name, value in parsed.query.items()})
    except (exc.ArgumentError, ValueError, ProgrammingError):
        # What they say may hold a part of the password.
        raise ValueError(
            "DATABASE_URL cannot be read; write postgresql://user:password@host:5432/name, and in the password "
            "%2F for /, %3A for :, %40 for @"
        ) from None
    if parsed.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise ValueError(f"DATABASE_URL must begin with postgresql://, not {parsed.drivername}://")
    return parsed.set(drivername="postgresql+psycopg")


def create_engine(url: str, *, pool_size: int = 10) -> AsyncEngine:
    """A pool of connections. Opens none before the first use.

    Dead connections are noticed when they are taken out (``pool_pre_ping``), so a restart of Postgres needs none here.
    """
    return create_async_engine(
        psycopg_url(url),
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=READ_TIMEOUT_S,
        pool_pre_ping=True,
        pool_recycle=1800,
        connect_args={
            "async_creator_fn": _PromptConnection.connect,
            "connect_timeout": CONNECT_TIMEOUT_S,
            "application_name": "penstock",
            # So often a statement looks whether its client is still there: without, one that was given up would run on.
            "options": f"-c timezone=UTC -c client_connection_check_interval={CHECK_INTERVAL_MS}",
        },
    )


@asynccontextmanager
async def disposing(*engines: AsyncEngine) -> AsyncIterator[None]:
    """Close the engines' connections at the end. One that is in use then would never be closed, so whoever uses them
    ends before.
    """
    try:
        yield
    finally:
        for engine in engines:
            await engine.dispose()


@asynccontextmanager
async def transaction(engine: AsyncEngine, *, timeout_s: float = READ_TIMEOUT_S) -> AsyncIterator[AsyncConnection]:
    """One transaction that must end within ``timeout_s``: committed at the end of the block, rolled back on any error.

    A connection that answers must be had within READ_TIMEOUT_S, so that a server that hangs is noticed as soon by those
    who have a long statement to run. Raises DatabaseUnavailable when Postgres is away, hangs, or breaks the connection;
    other errors pass as they are.
    """
    try:
        async with asyncio.timeout(timeout_s), AsyncExitStack() as stack:
            async with asyncio.timeout(min(timeout_s, READ_TIMEOUT_S)):
                connection = await stack.enter_async_context(engine.begin())
            yield connection
    except (TimeoutError, exc.TimeoutError) as fault:
        raise DatabaseUnavailable("the database does not answer; try again shortly") from fault
    except exc.DBAPIError as fault:
        if _is_outage(fault):
            raise DatabaseUnavailable("the database does not answer; try again shortly") from fault
        raise


_AS_TENANT = text(
    "SELECT set_config('role', 'penstock_tenant', true), set_config('penstock.tenant_id', :tenant_id, true), "
    "set_config('transaction_read_only', 'on', true)"
)


@asynccontextmanager
async def tenant_transaction(
    engine: AsyncEngine, tenant_id: UUID, *, timeout_s: float = READ_TIMEOUT_S
) -> AsyncIterator[AsyncConnection]:
    """A transaction that only reads, and whose every query sees this tenant's rows alone: for all that is read on a
    tenant's behalf, so that a query that forgets its filter shows nobody else's.

    Postgres holds it, by row-level security; the migrations say of which tables what may be seen. Raises as
    ``transaction``.
    """
    async with transaction(engine, timeout_s=timeout_s) as connection:
        await connection.execute(_AS_TENANT, {"tenant_id": str(tenant_id)})
        yield connection


def _is_outage(fault: exc.DBAPIError) -> bool:
    if fault.connection_invalidated or isinstance(fault, exc.InterfaceError):
        return True
    # Class 54: a value is too large for an index or a row. The caller's fault, whatever psycopg files it under.
    state: str = getattr(fault.orig, "sqlstate", None) or ""
    return isinstance(fault, exc.OperationalError) and not state.startswith("54")
