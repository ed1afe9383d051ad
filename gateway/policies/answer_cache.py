"""What a tenant, a project, a route and a request say of the answer cache, and what that comes to."""

from __future__ import annotations

from functools import reduce
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

Mode = Literal["off", "exact", "semantic"]
RequestMode = Literal["off", "exact", "semantic", "refresh"]
_REACH: Final[dict[str, int]] = {"off": 0, "exact": 1, "semantic": 2}


class CachePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One scope's say. None: as the wider scope has it (a request's route, project, tenant), or the default."""

    mode: Mode | None = None
    """Off, unless some scope opts in."""
    allowed: Mode | None = None
    """The most that narrower scopes and requests may opt in to; semantic, unless told otherwise."""
    ttl_s: Annotated[int, Meta(ge=1, le=30 * 24 * 3600)] | None = None
    """How long an answer is kept, from its making; a request may ask for less. 3600."""
    threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Least cosine of two texts that may mean the same; 0.85. The guards decide after it."""
    shadow: bool | None = None
    """Count what the semantic tier would have answered, and answer nothing by it."""
    verify_share: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Of the semantic hits, the share that is asked of the model all the same, to see whether it agrees; 0."""
    across_projects: bool | None = None
    across_end_users: bool | None = None
    """Share answers between the tenant's projects, and between end users; neither, unless told."""
    tool_calls: bool | None = None
    """Keep answers that call tools; no."""
    sampled: bool | None = None
    """Keep answers to requests whose temperature is above 0, or left to a default that is; no."""
    time_words: bool | None = None
    """Keep answers to prompts that speak of the present (today, latest); no."""
    single_flight: bool | None = None
    """Let identical requests that run at the same time share one answer; no."""
    max_answer_bytes: Annotated[int, Meta(ge=1, le=8 * 1024 * 1024)] | None = None
    """Longer answers are not kept; 262,144."""
    max_tenant_bytes: Annotated[int, Meta(ge=1, le=2**40)] | None = None
    """What one tenant's answers may take in Redis; the oldest go first. 67,108,864. The tenant's say alone counts."""
    hit_price_bp: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    """What a hit costs, in hundredths of a percent of what the answer would have cost; 0."""


class CacheRules(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for one request. Field by field as in CachePolicy."""

    mode: Mode = "off"
    refresh: bool = False
    """Answer by nothing that is kept, but keep the new answer."""
    ttl_s: int = 3600
    threshold: float = 0.85
    shadow: bool = False
    verify_share: float = 0.0
    across_projects: bool = False
    across_end_users: bool = False
    tool_calls: bool = False
    sampled: bool = False
    time_words: bool = False
    single_flight: bool = False
    max_answer_bytes: int = 256 * 1024
    max_tenant_bytes: int = 64 * 1024 * 1024
    hit_price_bp: int = 0


NO_POLICY: Final = CachePolicy()
NO_CACHE: Final = CacheRules()


def merge(wider: CachePolicy, narrower: CachePolicy) -> CachePolicy:
    """The narrower scope's say, where it has one, within what the wider allows. NO_POLICY itself, where neither has."""
    if wider == NO_POLICY == narrower:
        return NO_POLICY
    values = {
        field: narrow if (narrow := getattr(narrower, field)) is not None else getattr(wider, field)
        for field in CachePolicy.__struct_fields__
    }
    values["allowed"] = _least(wider.allowed, narrower.allowed)
    return CachePolicy(**values)


def rules_for(
    *policies: CachePolicy, request: RequestMode | None = None, request_ttl_s: int | None = None
) -> CacheRules:
    """``policies``: the tenant's, the project's and the route's, wider ones first. ``request``: what its header says.

    A request can make its answer's life shorter, never longer.
    """
    merged = reduce(merge, policies, NO_POLICY)
    refresh = request == "refresh"
    asked: Mode | None = merged.mode if request is None or request == "refresh" else request
    mode = _least(merged.allowed, asked or "off") or "off"
    if mode == "off":
        return NO_CACHE
    told = {
        field: value
        for field in CacheRules.__struct_fields__
        if field not in ("mode", "refresh") and (value := getattr(merged, field)) is not None
    }
    if request_ttl_s is not None:
        told["ttl_s"] = min(request_ttl_s, told.get("ttl_s", NO_CACHE.ttl_s))
    return CacheRules(mode=mode, refresh=refresh, **told)


def _least(one: Mode | None, other: Mode | None) -> Mode | None:
    if one is None or other is None:
        return one or other
    return one if _REACH[one] <= _REACH[other] else other
