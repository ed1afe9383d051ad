"""Who is calling, and what they may do: the result of authentication, passed down the pipeline."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

BudgetPeriod = Literal["day", "week", "month", "total"]
SHARDS = 64
LONGEST_REQUEST_S = 3600.0
"""No request may run longer, whatever its route allows: leases, tombstones and the proxy in front count on it."""


def shard_of(tenant_id: UUID) -> str:
    """The Redis hash tag, ``{s00}`` to ``{s63}``, that every key of the tenant's admissions carries."""
    digest = hashlib.sha256(tenant_id.bytes).digest()
    return f"{{s{digest[0] % SHARDS:02d}}}"


@dataclass(frozen=True, slots=True)
class Budget:
    """Most that a tenant may be charged in one period. ``amount`` is in nano-USD; 0 admits only what is free."""

    amount: int
    period: BudgetPeriod
    timezone: str
    """IANA name; periods begin and end at local midnight there."""


@dataclass(frozen=True, slots=True)
class Limits:
    """None: no limit. 0 is a limit: nothing passes."""

    requests_per_minute: int | None = None
    max_concurrent: int | None = None
    budget: Budget | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    tenant_id: UUID
    tenant_name: str
    key_id: str
    """Public part of the API key."""
    scopes: frozenset[str]
    limits: Limits
    generation: int
    """Counts changes to the tenant's configuration and keys. Admission compares it with the one stored in Redis."""
    salt: str
    """Opaque; differs between tenants; sent to workers as part of every block name."""
    allowed_models: frozenset[str] | None = None
    """Route names this key may call; None: all."""

    @property
    def shard(self) -> str:
        return shard_of(self.tenant_id)
