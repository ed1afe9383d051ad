"""Names of the Redis keys of one shard. All bear the shard's hash tag, so that one script may touch them together.

``{sNN}:epoch``                   time in ms from which the shard admits
``{sNN}:tenant:<id>``             hash: generation; settlements, a count; for each limit on slots of others than the
                                  tenant, its id, once its holders were counted
``{sNN}:tenant:<id>:live``        sorted set: running requests by the end of their lease in ms
``{sNN}:tenant:<id>:counters``    sorted set: names of the tenant's counters by the time in ms until which they may live
``{sNN}:tenant:<id>:<counter>``   one counter, named ``<kind>:<window>:<subject>:<target>`` (below)
``{sNN}:request:<id>``            hash: a reservation, with the counters it was taken from; later its tombstone
``{sNN}:leases``                  sorted set: all running requests of the shard by the end of their lease in ms
``{sNN}:usage``                   stream: ``event`` (JSON of a UsageEvent), ``revision`` (1; 2 of what may be
                                  settled already), ``again`` (1, where no reservation was found)
``{sNN}:alerts``                  stream: ``alert`` (JSON): a budget's threshold was crossed
``{sNN}:refusals``                hash: counts by ``<tenant id>|<key id>|<metric>|<begin of the quarter hour>``,
                                  the last in Unix seconds

Kinds of counters; the subject ``each`` is a limit that each end user has apart:
``b``        hash of a budget's running period: start, end (ms), spent, reserved (nano-USD); the limit's id;
             watch, its amount and thresholds; told, the highest threshold told of in this period
``r``, ``t`` hash of requests or tokens by bucket, a sixtieth of the window; ``n``, their sum; the ``oldest`` bucket
             counted; the limit's id; the shard's ``epoch`` when it was built
``c``        sorted set as ``live``, for subjects other than the tenant
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


def live(shard: str, tenant_id: UUID) -> str:
    return f"{shard}:tenant:{tenant_id}:live"


def request(shard: str, request_id: UUID | str) -> str:
    return f"{shard}:request:{request_id}"


def leases(shard: str) -> str:
    return f"{shard}:leases"


def usage(shard: str) -> str:
    return f"{shard}:usage"


def alerts(shard: str) -> str:
    return f"{shard}:alerts"


def refusals(shard: str) -> str:
    return f"{shard}:refusals"


@dataclass(frozen=True, slots=True)
class TenantKeys:
    """All keys that one tenant's admissions touch, spelled once."""

    id: str
    shard: str
    prefix: str
    epoch: str
    tenant: str
    live: str
    leases: str
    usage: str
    alerts: str
    refusals: str

    def request(self, request_id: UUID | str) -> str:
        return f"{self.prefix}request:{request_id}"


@lru_cache(maxsize=8192)
def of_tenant(tenant_id: UUID) -> TenantKeys:
    shard = shard_of(tenant_id)
    return TenantKeys(
        id=str(tenant_id),
        shard=shard,
        prefix=prefix(shard),
        epoch=epoch(shard),
        tenant=tenant(shard, tenant_id),
        live=live(shard, tenant_id),
        leases=leases(shard),
        usage=usage(shard),
        alerts=alerts(shard),
        refusals=refusals(shard),
    )
