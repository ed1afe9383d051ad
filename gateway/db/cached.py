"""A copy of some configuration in Postgres, good for a few seconds, that goes on serving while Postgres is away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import structlog

from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable

RETRY_S = 1.0
"""While Postgres is away and an old copy serves, how often a new one is asked for."""
PAUSE_FACTOR = 5.0
"""Or after so many times as long as the last try took, if that is longer: where Postgres hangs, tries take seconds."""

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class CachedCopy(Generic[T]):
    """What ``read`` gives, at most ``cache_s`` old unless Postgres is away."""

    def __init__(self, name: str, read: Callable[[], Awaitable[T]], clock: Clock, *, cache_s: float) -> None:
        """``name`` is for the log. ``read`` raises DatabaseUnavailable while Postgres is away."""
        self._name = name
        self._read = read
        self._clock = clock
        self._cache_s = cache_s
        self._copy: T | None = None
        self._good_until = float("-inf")
        self._expired = 0
        self._away = False
        self._refreshing = asyncio.Lock()

    def expire(self) -> None:
        """Read anew the next time: something was changed here."""
        self._good_until = float("-inf")
        self._expired += 1

    async def current(self) -> T:
        """Raises DatabaseUnavailable if no copy was ever read."""
        if self._copy is not None and self._clock.monotonic() < self._good_until:
            return self._copy
        if self._copy is not None and self._away and self._refreshing.locked():
            return self._copy  # one request that waits for Postgres is enough
        async with self._refreshing:
            began, expired = self._clock.monotonic(), self._expired
            if began < self._good_until:
                return self._last_copy()
            try:
                self._copy = await self._read()
                self._away = False
                # What was changed meanwhile may be missing.
                if expired == self._expired:
                    self._good_until = began + self._cache_s
            except DatabaseUnavailable as fault:
                _log.warning("copy_not_refreshed", of=self._name, error=str(fault))
                # Whoever waited here meanwhile must not wait for Postgres once more, each in turn.
                self._away = True
                self._good_until = ask_again_at(began, self._clock.monotonic())
            return self._last_copy()

    def _last_copy(self) -> T:
        if self._copy is None:
            raise DatabaseUnavailable("the database does not answer; try again shortly")
        return self._copy


def ask_again_at(began: float, now: float) -> float:
    """When to ask Postgres again after a try that ``began`` some time ago and failed ``now``."""
    return now + max(RETRY_S, PAUSE_FACTOR * (now - began))
