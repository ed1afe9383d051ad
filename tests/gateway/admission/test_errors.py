from __future__ import annotations

import pytest

from gateway.admission.errors import duration, rate_headers


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0s"), (1, "1ms"), (999, "999ms"), (1000, "1s"), (1500, "1.5s"), (60_391, "1m0.391s"), (360_000, "6m0s"),
     (3_600_000, "1h0m0s"), (3_723_004, "1h2m3.004s")],
)  # fmt: skip
def test_durations_read_as_openai_writes_them(ms: int, text: str) -> None:
    assert duration(ms) == text


def test_no_limit_no_headers() -> None:
    assert rate_headers(-1, 0, 0, -1, 0, 0) == {}
    assert rate_headers(0, 0, 0, -1, 0, 0) == {
        "x-ratelimit-limit-requests": "0",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "0s",
    }
    assert rate_headers(-1, 0, 0, 7, 5, 1500) == {
        "x-ratelimit-limit-tokens": "7",
        "x-ratelimit-remaining-tokens": "5",
        "x-ratelimit-reset-tokens": "1.5s",
    }
