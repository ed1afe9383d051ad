from __future__ import annotations

from gateway.policies.answer_cache import CachePolicy
from gateway.policies.prompt_log import NO_LOG, PromptLogPolicy
from gateway.policies.stored import read_policy


def test_what_a_later_release_stored_stops_no_request() -> None:
    assert read_policy({"mode": "exact", "colour": "blue"}, CachePolicy) == CachePolicy(mode="exact")
    assert read_policy({"level": "full", "retention_days": 7}, PromptLogPolicy) == PromptLogPolicy(
        level="full", retention_days=7
    )


def test_what_is_half_understood_keeps_and_logs_nothing() -> None:
    assert read_policy({"mode": "by-dreams", "ttl_s": 5}, CachePolicy) == CachePolicy()
    assert read_policy({"level": "summary"}, PromptLogPolicy) == NO_LOG
