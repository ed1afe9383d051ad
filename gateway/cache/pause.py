"""Leaving alone what does not answer: so that while it hangs, hardly anybody waits for it."""

from __future__ import annotations

from typing import Final

from gateway.clock import Clock

FAULTS: Final = 2
"""In a row, after which it is left alone."""
PAUSE_S: Final = 1.0
"""For so long; then one at a time tries again."""


class Paused(Exception):
    """It is left alone just now."""


class Pause:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._faults = 0
        self._until = float("-inf")

    def over(self) -> bool:
        """Whether to try. One who is told so says how it went, or nobody else is for a while."""
        if self._faults < FAULTS:
            return True
        now = self._clock.monotonic()
        if now < self._until:
            return False
        self._until = now + PAUSE_S
        return True

    def check(self) -> None:
        """As ``over``. Raises Paused."""
        if not self.over():
            raise Paused

    def went_well(self) -> None:
        self._faults = 0

    def failed(self) -> None:
        self._faults += 1
        self._until = self._clock.monotonic() + PAUSE_S
