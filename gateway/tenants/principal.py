"""Who is calling, and what they may do: the result of authentication, passed down the pipeline."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal
from uuid import UUID

from gateway.policies.answer_cache import NO_POLICY, CachePolicy
from gateway.policies.prompt_log import NO_LOG, PromptLogPolicy

BudgetPeriod = Literal["day", "week", "month", "total"]
Subject = Literal["tenant", "project", "key", "end_user", "model"]
Metric = Literal["requests", "tokens", "concurrent", "budget"]
RateWindow = Literal["minute", "hour", "day"]
RedisLossPolicy = Literal["fail_closed", "fail_open"]
Scope = Literal["inference", "usage:read", "prompts:read"]
AdminRole = Literal["owner", "admin", "viewer"]
NO_PROJECT = UUID(int=0)
SHARDS = 64
LONGEST_REQUEST_S = 3600.0
"""No request may run longer, whatever its route allows: leases, tombstones and the proxy in front count on it."""


def shard_of(tenant_id: UUID) -> str:
    """The Redis hash tag, ``{s00}`` to ``{s63}``, that every key of the tenant's admissions carries."""
    digest = hashlib.sha256(tenant_id.bytes).digest()
    return f"{{s{digest[0] % SHARDS:02d}}}"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of a tenant, as admission enforces it. Unique by subject, target, metric and window."""

    id: UUID
    subject: Subject
    target: str
    """Whose: '' for the tenant; a project's id; a key's public id; a route's name (tenant x model); the keyed hash of
    one end user, or '' for each end user apart."""
    metric: Metric
    window: RateWindow | BudgetPeriod | None
    """minute, hour or day for requests and tokens; day, week, month or total for a budget; None for concurrent."""
    amount: int
    """Requests, tokens, slots, or nano-USD. 0 is a limit: nothing passes (a budget of 0: only what is free)."""
    hard: bool = True
    """False: over it nothing is refused, only told."""
    thresholds: tuple[int, ...] = ()
    """Budgets: percentages of the amount whose crossing is told by webhook, ascending, 1 to 1000."""


@dataclass(frozen=True, slots=True)
class Principal:
    tenant_id: UUID
    tenant_name: str
    key_id: str
    """Public part of the API key."""
    scopes: frozenset[str]
    generation: int
    """Counts changes to the tenant's configuration and keys. Admission compares it with the one stored in Redis."""
    salt: str
    """Opaque; differs between tenants; sent to workers as part of every block name."""
    allowed_models: frozenset[str] | None = None
    """Route names this key may call; None: all."""
    project_id: UUID = NO_PROJECT
    project_name: str = ""
    timezone: str = "UTC"
    """IANA name of the tenant's zone: budget periods begin and end at local midnight there."""
    tenant_limits: tuple[Limit, ...] = ()
    """All limits that may bear on a request of this key: the tenant's, its project's, its own, those of end users and
    of models."""
    max_context_tokens: int | None = None
    """Most tokens of prompt and output together that a request of this key may have; None: the route's own."""
    max_output_tokens: int | None = None
    redis_loss: RedisLossPolicy = "fail_closed"
    """While Redis is away: refuse requests, or serve them unchecked and account for them when it is back."""
    markup_bp: int = 0
    """Added to the list price, in hundredths of a percent; a price of the tenant's own is charged as it is."""
    weight: float = 1.0
    """Share among tenants of a worker's fair queue."""
    answer_cache: CachePolicy = NO_POLICY
    """The tenant's say and, within it, the project's."""
    prompt_log: PromptLogPolicy = NO_LOG

    @property
    def shard(self) -> str:
        return shard_of(self.tenant_id)
