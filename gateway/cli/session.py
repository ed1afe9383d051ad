"""What the administrative commands share: a connection to the state, and errors in one line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import click
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.wiring import create_admission
from gateway.backends.brands import BRANDS
from gateway.billing.prices import PriceBook
from gateway.billing.report_query import InvalidReport
from gateway.clock import Clock, SystemClock
from gateway.db.engine import DatabaseUnavailable, create_engine
from gateway.secret_key import SecretKey
from gateway.settings import Settings, load_settings
from gateway.tenants.audit import Actor
from gateway.tenants.backend_changes import BackendChanges
from gateway.tenants.catalog import Catalog
from gateway.tenants.directory import Directory
from gateway.tenants.records import ConfigurationError
from gateway.tenants.service import Tenants

T = TypeVar("T")
_NOT_MIGRATED = {"42P01": "The database has no tables yet.", "42703": "The database is of an earlier release."}
"""What an undefined table and an undefined column tell."""


@dataclass(frozen=True, slots=True)
class Session:
    engine: AsyncEngine
    clock: Clock
    tenants: Tenants
    directory: Directory
    catalog: Catalog
    backends: BackendChanges
    prices: PriceBook
    actor: Actor


@asynccontextmanager
async def open_session(settings: Settings) -> AsyncIterator[Session]:
    """Changes made through it are announced to every gateway through Redis."""
    engine = create_engine(settings.database_url, pool_size=2)
    clock = SystemClock()
    admission = create_admission(settings, engine, clock)
    try:
        secret_key = SecretKey(settings.secret_key) if settings.secret_key else None
        directory = Directory(engine, clock, secret_key=secret_key, announce=admission.announce_generation)
        tenants, catalog, prices = Tenants(engine, clock), Catalog(engine, clock), PriceBook(engine, clock)
        backends = BackendChanges(engine, secret_key, BRANDS)
        yield Session(engine, clock, tenants, directory, catalog, backends, prices, Actor.at_console())
    finally:
        await admission.close()
        await engine.dispose()


def run(work: Callable[[Session], Awaitable[T]]) -> T:
    """Do ``work`` in a session. Raises click.ClickException for what the user can mend."""

    async def main() -> T:
        async with open_session(load_settings()) as session:
            return await work(session)

    try:
        return asyncio.run(main())
    except (ConfigurationError, InvalidReport) as fault:
        raise click.ClickException(str(fault)) from fault
    except DatabaseUnavailable as fault:
        raise click.ClickException(
            "Postgres does not answer. Is it running, and is DATABASE_URL (or .penstock/settings.toml) right? "
            "`penstock up` starts one of its own."
        ) from fault
    except ProgrammingError as fault:
        told = _NOT_MIGRATED.get(getattr(fault.orig, "sqlstate", None) or "")
        if told is None:
            raise
        raise click.ClickException(f"{told} Run `penstock migrate` first.") from fault
