"""Usage reports: what was asked, used and charged, summed by whatever the reader wants to see apart."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from sqlalchemy import Text, cast, func, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.billing.ledger import QUARTER_S
from gateway.billing.local_time import Range, Unit, common, slots
from gateway.billing.report_query import InvalidReport, NotFound, UsageQuery
from gateway.billing.report_source import Filters
from gateway.billing.report_statement import UNITS, Report, Statement
from gateway.db.engine import DatabaseUnavailable, tenant_transaction, transaction
from gateway.db.tables import api_keys, dead_usage_events, projects, tenants, usage_rollup
from gateway.secret_key import SecretKey
from gateway.tenants.end_users import end_user_hash

REPORT_TIMEOUT_S = 30.0
_GRACE_S = 2.0
"""Longer than that Postgres is not waited for: by then it has stopped the statement itself, or it hangs."""
_QUERY_CANCELED = "57014"
HashEndUser = Callable[[UUID, str], str]
"""The keyed hash under which the ledger knows a tenant's end user."""
# Compiling a statement takes longer than running it, and a sum that spills to disk is a slow one.
_FOR_LONG_SUMS = text(
    "SELECT set_config('jit', 'off', true), set_config('work_mem', '64MB', true), "
    "set_config('statement_timeout', :timeout, true)"
)
_HASH = re.compile(r"[0-9a-f]{32}", re.ASCII)


def end_user_hasher(secret_key: str | None) -> HashEndUser | None:
    """``secret_key``: the deployment's, of which the ledger's hashes were made."""
    if secret_key is None:
        return None
    key = SecretKey(secret_key)
    return lambda tenant_id, given: end_user_hash(key, tenant_id, given)


async def usage_report(
    engine: AsyncEngine, query: UsageQuery, *, own: UUID | None = None, hash_end_user: HashEndUser | None = None
) -> Report:
    """Answer ``query``. Without ``group_by``: one row, or none if nothing was used.

    own: the tenant that asks; it sees its own requests alone. None: an administrator asks. hash_end_user: None if end
    users can be named by their hashes only. Raises InvalidReport, NotFound, DatabaseUnavailable.
    """
    checked = query.checked()
    async with reading(engine, own) as connection:
        filters = await _filters(connection, query, own, hash_end_user)
        ranges = checked.ranges
        units = [unit for unit in UNITS if unit in checked.group_by]
        if units:
            ranges = common(ranges, await _recorded(connection, filters))
        # In threads: a long report takes a while to make, and requests are served beside it.
        begins = await asyncio.to_thread(_begins, units, ranges, checked.zone)
        statement = Statement(checked, filters, ranges, begins, str(own))
        if not ranges:
            return Report([], None)
        found = list(await connection.execute(statement.query()))
    return await asyncio.to_thread(statement.report, found)


def _begins(units: Sequence[Unit], ranges: Sequence[Range], zone: ZoneInfo) -> dict[Unit, list[datetime]]:
    return {unit: slots(unit, ranges[0][0], ranges[-1][1], zone) if ranges else [] for unit in units}


async def dead_event_count(engine: AsyncEngine) -> int:
    """How many usage events could not become rows and wait in ``dead_usage_events``. Raises DatabaseUnavailable."""
    async with transaction(engine, timeout_s=REPORT_TIMEOUT_S) as connection:
        return int(await connection.scalar(select(func.count()).select_from(dead_usage_events)) or 0)


@asynccontextmanager
async def reading(engine: AsyncEngine, own: UUID | None) -> AsyncIterator[AsyncConnection]:
    """A transaction for long sums; ``own``: the tenant whose rows alone it sees.

    Raises InvalidReport for a statement that takes longer than REPORT_TIMEOUT_S, DatabaseUnavailable.
    """
    limit_s = REPORT_TIMEOUT_S + _GRACE_S
    if own is None:
        opened = transaction(engine, timeout_s=limit_s)
    else:
        opened = tenant_transaction(engine, own, timeout_s=limit_s)
    try:
        async with opened as connection:
            await connection.execute(_FOR_LONG_SUMS, {"timeout": f"{REPORT_TIMEOUT_S * 1000:.0f}ms"})
            yield connection
    except DatabaseUnavailable as fault:
        if getattr(getattr(fault.__cause__, "orig", None), "sqlstate", None) != _QUERY_CANCELED:
            raise
        raise InvalidReport(
            "start",
            f"the report takes longer than {REPORT_TIMEOUT_S:.0f} s; let start and end be closer together, or ask for "
            "one tenant, or not by end user or tag",
        ) from fault


async def _filters(
    connection: AsyncConnection, query: UsageQuery, own: UUID | None, hash_end_user: HashEndUser | None
) -> Filters:
    """What the query's names stand for. Raises NotFound, InvalidReport."""
    owners: list[UUID] | None = [own] if own is not None else None
    if query.tenant and own is None:
        found = await connection.execute(select(tenants.c.id, tenants.c.name).where(_named(tenants.c, query.tenant)))
        owners = _all_found("tenant", query.tenant, [(row.id, row.name) for row in found])
    wanted: list[UUID] | None = None
    if query.project:
        statement = select(projects.c.id, projects.c.name).where(_named(projects.c, query.project))
        if owners is not None:
            statement = statement.where(projects.c.tenant_id.in_(owners))
        found = await connection.execute(statement)
        wanted = _all_found("project", query.project, [(row.id, row.name) for row in found])
    if query.key:
        statement = select(api_keys.c.public_id).where(api_keys.c.public_id.in_(query.key))
        statement = statement.where(api_keys.c.tenant_id.in_(owners) if owners else api_keys.c.tenant_id.is_not(None))
        known = set(await connection.scalars(statement))
        for key in query.key:
            if key not in known:
                raise NotFound("key", key)
    return Filters(
        tenants=owners,
        projects=wanted,
        keys=query.key or None,
        models=query.model or None,
        backends=query.backend or None,
        statuses=query.status or None,
        end_users=_end_users(query.end_user, owners, hash_end_user) if query.end_user else None,
        tags=query.tag or None,
    )


def _named(columns: Any, refs: Sequence[str]) -> Any:
    return or_(columns.name.in_(refs), cast(columns.id, Text).in_([ref.lower() for ref in refs]))


def _all_found(parameter: str, refs: Sequence[str], found: list[tuple[UUID, str]]) -> list[UUID]:
    known = {name for _, name in found} | {str(each) for each, _ in found}
    for ref in refs:
        if ref not in known and ref.lower() not in known:
            raise NotFound(parameter, ref)
    return [each for each, _ in found]


def _end_users(given: Sequence[str], owners: list[UUID] | None, hash_end_user: HashEndUser | None) -> list[str]:
    """Hashes of what was given, and what may be a hash itself: no name is likely to be another's hash."""
    hashes = []
    for value in given:
        if _HASH.fullmatch(value):
            hashes.append(value)
        elif owners is None or hash_end_user is None:
            raise InvalidReport(
                "end_user", "end_user takes the 32 hex digits that reports show or, beside a tenant, the user's own id"
            )
        if owners is not None and hash_end_user is not None:
            hashes += [hash_end_user(owner, value) for owner in owners]
    return hashes


async def _recorded(connection: AsyncConnection, filters: Filters) -> list[Range]:
    """From the first to the last quarter hour in which anything was used."""
    bucket = usage_rollup.c.bucket
    query = select(func.min(bucket), func.max(bucket))
    if filters.tenants is not None:
        query = query.where(usage_rollup.c.tenant_id.in_(filters.tenants))
    first, last = (await connection.execute(query)).one()
    return [] if first is None else [(first.astimezone(UTC), last.astimezone(UTC) + timedelta(seconds=QUARTER_S))]
