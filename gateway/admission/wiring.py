"""Admission as gateways and the command line both have it: by the settings, with counters built from the ledger."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.service import Admission
from gateway.billing.ledger_sums import PostgresSums
from gateway.clock import Clock
from gateway.settings import Settings

MAX_UNSETTLED = 50_000
"""About 100 MB; on disk, too, unless that fails."""


def create_admission(settings: Settings, ledger: AsyncEngine, clock: Clock) -> Admission:
    """``ledger``: connections for the sums from which counters are built. Connects to nothing yet."""
    return Admission(
        settings.redis_url,
        clock,
        lease_s=settings.lease_s,
        renewal_s=settings.lease_renewal_s,
        timeout_s=settings.redis_timeout_s,
        ledger=PostgresSums(ledger),
        max_unsettled=MAX_UNSETTLED,
        spool_dir=Path(settings.spool_dir),
    )
