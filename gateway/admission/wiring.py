"""Admission as gateways and the command line both have it: by the settings, with counters built from the ledger."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.service import Admission
from gateway.billing.ledger_sums import PostgresSums
from gateway.clock import Clock
from gateway.settings import Settings


def create_admission(settings: Settings, ledger: AsyncEngine, clock: Clock) -> Admission:
    """``ledger``: connections for the sums from which counters are built. Connects to nothing yet."""
    return Admission(
        settings.redis_url,
        clock,
        lease_s=settings.lease_s,
        renewal_s=settings.lease_renewal_s,
        timeout_s=settings.redis_timeout_s,
        ledger=PostgresSums(ledger),
    )
