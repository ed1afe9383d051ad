from __future__ import annotations

import msgspec
import pytest

from gateway.policies.answer_cache import NO_CACHE, NO_POLICY, CachePolicy, CacheRules, merge, rules_for


def test_nothing_is_kept_unless_some_scope_opts_in() -> None:
    assert rules_for() == NO_CACHE
    assert rules_for(NO_POLICY, CachePolicy(ttl_s=5)) == NO_CACHE
    for opting in range(3):
        policies = [NO_POLICY] * 3
        policies[opting] = CachePolicy(mode="exact")
        assert rules_for(*policies).mode == "exact"
    assert rules_for(request="semantic").mode == "semantic"


def test_the_narrower_scope_decides_within_what_the_wider_ones_allow() -> None:
    tenant = CachePolicy(mode="semantic", ttl_s=60, threshold=0.0, across_projects=True)
    route = CachePolicy(mode="exact", threshold=0.9, across_projects=False)
    assert rules_for(tenant, route) == CacheRules(mode="exact", ttl_s=60, threshold=0.9)
    assert rules_for(tenant).threshold == 0.0  # 0 is a value
    assert rules_for(tenant, CachePolicy(mode="off")).mode == "off"
    assert rules_for(CachePolicy(mode="semantic", allowed="exact")).mode == "exact"
    assert rules_for(CachePolicy(allowed="exact"), CachePolicy(mode="semantic", allowed="semantic")).mode == "exact"
    assert rules_for(CachePolicy(allowed="off"), request="exact") == NO_CACHE
    assert merge(CachePolicy(allowed="exact"), CachePolicy(allowed="off")).allowed == "off"


def test_a_request_may_keep_out_ask_anew_and_shorten_an_answers_life() -> None:
    tenant = CachePolicy(mode="semantic", ttl_s=60)
    assert rules_for(tenant, request="off") == NO_CACHE
    assert rules_for(tenant, request="refresh") == CacheRules(mode="semantic", refresh=True, ttl_s=60)
    assert rules_for(tenant, request_ttl_s=5).ttl_s == 5
    assert rules_for(tenant, request_ttl_s=600).ttl_s == 60
    assert rules_for(request="refresh") == NO_CACHE  # it opts in to nothing
    assert rules_for(request="exact", request_ttl_s=9999).ttl_s == 3600


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "maybe"},
        {"ttl_s": 0},
        {"ttl_s": 2_592_001},
        {"threshold": 1.01},
        {"threshold": -0.1},
        {"verify_share": 2},
        {"max_answer_bytes": 0},
        {"hit_price_bp": 10_001},
        {"unknown": 1},
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(values, CachePolicy)


def test_only_what_differs_is_stored() -> None:
    policy = CachePolicy(mode="exact", threshold=0.0, shadow=False)
    stored = msgspec.to_builtins(policy)
    assert stored == {"mode": "exact", "threshold": 0.0, "shadow": False}
    assert msgspec.convert(stored, CachePolicy) == policy
