"""Names of the Redis keys of one shard. All bear the shard's hash tag, so that one script may touch them together.

``{sNN}:epoch``                   time in ms from which the shard admits
``{sNN}:tenant:<id>``             hash: generation; kind, start, end, spent, reserved of the budget's running period;
                                  settlements, a count
``{sNN}:tenant:<id>:window``      hash: admitted requests by second, their sum ``n``, the ``oldest`` second counted
``{sNN}:tenant:<id>:live``        sorted set: running requests by the end of their lease in ms
``{sNN}:request:<id>``            hash: a reservation; once settled, its tombstone
``{sNN}:leases``                  sorted set: all running requests of the shard by the end of their lease in ms
``{sNN}:usage``                   stream: ``event`` (JSON of a UsageEvent), ``revision`` (1 or 2)
``{sNN}:refusals``                hash: counts by ``<tenant id>|<key id>|<reason>|<begin of the quarter hour>``,
                                  the last in Unix seconds
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from uuid import UUID

from gateway.tenants.principal import SHARDS, shard_of

ALL_SHARDS = tuple(f"{{s{number:02d}}}" for number in range(SHARDS))


def prefix(shard: str) -> str:
    return f"{shard}:"


def epoch(shard: str) -> str:
    return f"{shard}:epoch"


def tenant(shard: str, tenant_id: UUID) -> str:
    return f"{shard}:tenant:{tenant_id}"


def window(shard: str, tenant_id: UUID) -> str:
    return f"{shard}:tenant:{tenant_id}:window"


def live(shard: str, tenant_id: UUID) -> str:
    return f"{shard}:tenant:{tenant_id}:live"


def request(shard: str, request_id: UUID | str) -> str:
    return f"{shard}:request:{request_id}"


def leases(shard: str) -> str:
    return f"{shard}:leases"


def usage(shard: str) -> str:
    return f"{shard}:usage"


def refusals(shard: str) -> str:
    return f"{shard}:refusals"


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """All keys that one tenant's admissions touch, spelled once."""

    id: str
    shard: str
    epoch: str
    tenant: str
    window: str
    live: str
    leases: str
    usage: str
    refusals: str


@lru_cache(maxsize=8192)
def of_tenant(tenant_id: UUID) -> TenantKeys:
    shard = shard_of(tenant_id)
    return TenantKeys(
        id=str(tenant_id),
        shard=shard,
        epoch=epoch(shard),
        tenant=tenant(shard, tenant_id),
        window=window(shard, tenant_id),
        live=live(shard, tenant_id),
        leases=leases(shard),
        usage=usage(shard),
        refusals=refusals(shard),
    )
