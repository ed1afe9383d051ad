"""Why a request was not admitted."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.tenants.principal import BudgetPeriod, Metric, RateWindow, Subject


class Refused(Exception):
    """A limit stands against the request; nothing was used up.

    ``reason``: the limit's metric. ``subject``, ``window``: whose limit, and over which time (None: at a time).
    ``limit`` and ``remaining`` are in the metric's own unit: requests, tokens, slots or nano-USD.
    ``retry_after_s``: the earliest time at which this request would pass, in seconds from now: exact for requests,
    tokens and a spent budget, one second where it depends on when running requests end, None if no waiting helps
    (a limit of 0, a request above the whole limit, a budget that never begins anew).
    ``headers``: ``x-ratelimit-*`` as on an admitted request.
    """

    def __init__(
        self,
        reason: Metric,
        *,
        subject: Subject,
        window: RateWindow | BudgetPeriod | None,
        limit: int,
        remaining: int,
        retry_after_s: float | None,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(f"{subject}: {reason}")
        self.reason: Metric = reason
        self.subject: Subject = subject
        self.window: RateWindow | BudgetPeriod | None = window
        self.limit = limit
        self.remaining = remaining
        self.retry_after_s = retry_after_s
        self.headers = dict(headers)

    @property
    def reset(self) -> float | None:
        """Seconds until this request would pass; the same as ``retry_after_s``."""
        return self.retry_after_s


class Stale(Exception):
    """The principal is older than the tenant's configuration: load it anew and ask once more.

    ``generation``: of the configuration, as announced.
    """

    def __init__(self, generation: int) -> None:
        super().__init__(generation)
        self.generation = generation


def duration(ms: int) -> str:
    """As OpenAI writes the time of a reset: ``0s``, ``250ms``, ``1.5s``, ``6m0s``, ``1h0m0s``."""
    if not ms:
        return "0s"
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:g}s"
    if not minutes:
        return seconds
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}"


def rate_headers(
    requests: int, requests_left: int, requests_ms: int, tokens: int, tokens_left: int, tokens_ms: int
) -> dict[str, str]:
    """Of the tightest limit of requests, and of tokens: its amount, below 0 if there is none; what is left of it; the
    milliseconds until a request such as this would pass."""
    headers = {}
    if requests >= 0:
        headers["x-ratelimit-limit-requests"] = str(requests)
        headers["x-ratelimit-remaining-requests"] = str(requests_left)
        headers["x-ratelimit-reset-requests"] = duration(requests_ms)
    if tokens >= 0:
        headers["x-ratelimit-limit-tokens"] = str(tokens)
        headers["x-ratelimit-remaining-tokens"] = str(tokens_left)
        headers["x-ratelimit-reset-tokens"] = duration(tokens_ms)
    return headers
