"""One request's own row of the ledger, as its tenant may see it."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.reports import reading
from gateway.billing.usage import Status, UsageSource, usd_text
from gateway.db.tables import api_keys, projects, usage_events


class RequestUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one request came to. Durations are milliseconds from its admission on."""

    request_id: UUID
    admitted_at: datetime
    project: str
    """Name; the id, should the project be gone."""
    project_id: UUID
    key_id: str
    key_name: str | None
    model: str
    status: Status
    streamed: bool
    prompt_tokens: int
    """All input, also what was read from a cache or written to one."""
    completion_tokens: int
    """All output, reasoning included."""
    cached_tokens: int
    cache_write_tokens: int
    reasoning_tokens: int
    images: int
    compute_us: int
    usage_source: UsageSource
    """Who counted the tokens."""
    charged_nano_usd: int
    charged_usd: str
    price_id: UUID | None
    """Version of the price; null: the model had none."""
    over_bound: bool
    """The charge came out above what was reserved."""
    attempts: int
    error_code: str | None
    client_request_id: str | None
    queue_ms: int | None
    first_token_ms: int | None
    total_ms: int | None
    end_user: str | None
    """Keyed hash."""
    tags: list[str]
    cache: str | None
    """By which tier a kept answer was found, ``exact`` or ``semantic``; null: by none."""
    saved_nano_usd: int
    saved_tokens: int


_JOINED = {"project", "key_name", "model", "charged_usd"}
_COLUMNS = tuple(name for name in RequestUsage.__struct_fields__ if name not in _JOINED)


async def own_request(engine: AsyncEngine, tenant_id: UUID, request_id: UUID) -> RequestUsage | None:
    """None: there is none of this id, or it is another tenant's. Raises DatabaseUnavailable."""
    query = (
        select(
            *(usage_events.c[name] for name in _COLUMNS),
            usage_events.c.route.label("model"),
            projects.c.name.label("project"),
            api_keys.c.name.label("key_name"),
        )
        .select_from(
            usage_events.outerjoin(projects, projects.c.id == usage_events.c.project_id).outerjoin(
                api_keys, api_keys.c.public_id == usage_events.c.key_id
            )
        )
        .where(usage_events.c.request_id == request_id, usage_events.c.tenant_id == tenant_id)
    )
    async with reading(engine, tenant_id) as connection:
        row = (await connection.execute(query)).mappings().first()
    if row is None:
        return None
    values = dict(row) | {
        "admitted_at": row["admitted_at"].astimezone(UTC),
        "project": row["project"] or str(row["project_id"]),
        "charged_usd": usd_text(row["charged_nano_usd"]),
    }
    return RequestUsage(**values)
