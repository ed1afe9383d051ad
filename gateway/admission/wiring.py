"""Admission as gateways and the command line both have it: by the settings, with budgets summed in the ledger."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.service import Admission
from gateway.billing.reports import charged_between
from gateway.clock import Clock
from gateway.settings import Settings


def create_admission(settings: Settings, ledger: AsyncEngine, clock: Clock) -> Admission:
    """``ledger``: connections for the sums from which a budget is rebuilt. Connects to nothing yet."""

    async def spent(tenant_id: UUID, start: datetime, end: datetime, excluding: Collection[UUID]) -> int:
        return await charged_between(ledger, tenant_id, start, end, excluding=excluding)

    return Admission(
        settings.redis_url,
        clock,
        lease_s=settings.lease_s,
        renewal_s=settings.lease_renewal_s,
        timeout_s=settings.redis_timeout_s,
        spent=spent,
    )
