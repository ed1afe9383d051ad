from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.normalise import MAX_TOKENS, anthropic_usage, openai_usage
from gateway.billing.usage import TokenUsage

Normalise = Callable[..., TokenUsage]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
COUNT = st.integers(0, MAX_TOKENS) | st.integers() | JSON
DETAILS = JSON | st.fixed_dictionaries(
    {},
    optional={
        "cached_tokens": COUNT,
        "cache_write_tokens": COUNT,
        "reasoning_tokens": COUNT,
        "audio_tokens": COUNT,
        "ephemeral_5m_input_tokens": COUNT,
        "ephemeral_1h_input_tokens": COUNT,
    },
)
REPORTS = JSON | st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens"), COUNT),
        **dict.fromkeys(("cache_read_input_tokens", "cache_creation_input_tokens", "prompt_cache_hit_tokens"), COUNT),
        **dict.fromkeys(("prompt_tokens_details", "completion_tokens_details", "cache_creation"), DETAILS),
        **dict.fromkeys(("input_tokens_details", "output_tokens_details"), DETAILS),
    },
)


def test_openai_counts_cached_and_reasoning_inside() -> None:
    reported = {
        "prompt_tokens": 100,
        "completion_tokens": 50,
        "total_tokens": 150,
        "prompt_tokens_details": {"cached_tokens": 60, "audio_tokens": 7, "image_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 20, "audio_tokens": 5, "rejected_prediction_tokens": 1},
    }
    assert openai_usage(reported) == TokenUsage(100, 50, 60, reasoning_tokens=20)


def test_the_responses_api_says_input_and_output() -> None:
    reported = {
        "input_tokens": 100,
        "output_tokens": 50,
        "input_tokens_details": {"cached_tokens": 60},
        "output_tokens_details": {"reasoning_tokens": 20},
    }
    assert openai_usage(reported) == TokenUsage(100, 50, 60, reasoning_tokens=20)


def test_anthropic_counts_cache_reads_and_writes_beside() -> None:
    reported = {
        "input_tokens": 10,
        "cache_read_input_tokens": 60,
        "cache_creation_input_tokens": 30,
        "cache_creation": {"ephemeral_5m_input_tokens": 30, "ephemeral_1h_input_tokens": 0},
        "output_tokens": 50,
        "service_tier": "standard",
    }
    assert anthropic_usage(reported) == TokenUsage(100, 50, 60, cache_write_tokens=30)
    del reported["cache_creation_input_tokens"]
    assert anthropic_usage(reported) == TokenUsage(100, 50, 60, cache_write_tokens=30)


def test_anthropics_running_totals_are_not_added_up() -> None:
    usage = anthropic_usage({"input_tokens": 10, "cache_read_input_tokens": 60, "output_tokens": 1})
    for output in (5, 9, 12):
        usage = anthropic_usage({"output_tokens": output}, usage)
    assert usage == TokenUsage(70, 12, 60)
    # A later report may correct the prompt, too.
    usage = anthropic_usage({"input_tokens": 11, "cache_creation_input_tokens": 4, "output_tokens": 13}, usage)
    assert usage == TokenUsage(75, 13, 60, cache_write_tokens=4)


def test_anthropics_thinking_is_inside_its_output() -> None:
    usage = anthropic_usage({"input_tokens": 3, "output_tokens": 9, "output_tokens_details": {"thinking_tokens": 4}})
    assert usage == TokenUsage(3, 9, reasoning_tokens=4)
    assert anthropic_usage({"output_tokens": 12}, usage) == TokenUsage(3, 12, reasoning_tokens=4)


def test_openais_running_totals_are_not_added_up() -> None:
    usage = TokenUsage(compute_us=7, source="counted")
    for completion in (1, 2, 3):
        usage = openai_usage({"prompt_tokens": 9, "completion_tokens": completion}, usage)
    usage = openai_usage({"completion_tokens_details": {"reasoning_tokens": 2}}, usage)
    assert usage == TokenUsage(9, 3, reasoning_tokens=2, compute_us=7)


@pytest.mark.parametrize("normalise", [openai_usage, anthropic_usage])
@pytest.mark.parametrize("nothing", [None, {}, [], "usage", 7, {"prompt_tokens": None}, {"input_tokens": -1}])
def test_a_report_of_nothing_changes_nothing(normalise: Normalise, nothing: Any) -> None:
    before = TokenUsage(5, 6, source="counted")
    assert normalise(nothing, before) is before


@pytest.mark.parametrize("value", [-1, True, "7", None, 1.5, float("nan"), float("inf"), 10**13, [7], {"a": 7}])
def test_what_is_no_count_was_not_reported(value: Any) -> None:
    assert openai_usage({"prompt_tokens": value, "completion_tokens": 3}) == TokenUsage(0, 3)
    assert anthropic_usage({"input_tokens": value, "output_tokens": 3}) == TokenUsage(0, 3)
    assert openai_usage({"prompt_tokens": 9.0, "completion_tokens": 0}) == TokenUsage(9, 0)


@pytest.mark.parametrize("normalise", [openai_usage, anthropic_usage])
@given(reports=st.lists(REPORTS, max_size=3))
def test_whatever_is_sent_usage_makes_sense(normalise: Normalise, reports: list[Any]) -> None:
    usage = TokenUsage()
    for reported in reports:
        usage = normalise(reported, usage)
        assert 0 <= usage.prompt_tokens <= MAX_TOKENS
        assert 0 <= usage.completion_tokens <= MAX_TOKENS
        assert min(usage.cached_tokens, usage.cache_write_tokens, usage.reasoning_tokens) >= 0
        assert usage.cached_tokens + usage.cache_write_tokens <= usage.prompt_tokens
        assert usage.reasoning_tokens <= usage.completion_tokens
        assert {type(count) for count in (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)} == {int}
