"""The circuit breaker of one endpoint: whether requests are sent there.

Closed: yes. Open: no, until a cool-down is over. Half-open, from then on: one trial at a time, which closes it or opens
it again for longer. Times are seconds on the clock that the callers read; nothing here waits.
"""

from __future__ import annotations

from random import Random
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]

FAILURES_IN_A_ROW = 5
"""So many failures without a success between them open it."""
WINDOW_S = 30.0
LEAST_REQUESTS = 20
FAILURE_SHARE = 0.5
"""And so does this share of failures among at least so many requests within the window."""
MISSED_PROBES = 3
"""And so many probes without an answer."""
COOL_DOWN_S = 2.0
LONGEST_COOL_DOWN_S = 30.0
"""The cool-down doubles from the one to the other while trials fail."""
JITTER = 0.2
"""Share by which a cool-down varies, so that replicas don't try in step."""


class Breaker:
    __slots__ = (
        "_bad",
        "_began",
        "_belied",
        "_by_probe",
        "_good",
        "_openings",
        "_random",
        "_streak",
        "_was_bad",
        "_was_good",
        "missed_probes",
        "open_until",
        "trials",
    )

    def __init__(self, random: Random) -> None:
        self._random = random
        self.trials = 0
        """Requests under way that were sent while it was not closed."""
        self.reset()

    def reset(self) -> None:
        """As new; trials under way still end."""
        self.open_until = 0.0
        """0: closed."""
        self.missed_probes = 0
        """In a row."""
        self._openings = 0
        self._by_probe = False
        self._belied = False
        self._clear()

    def _clear(self) -> None:
        self._streak = 0
        self._good = self._bad = self._was_good = self._was_bad = 0
        self._began = 0.0

    def state(self, now: float) -> BreakerState:
        if self.open_until == 0.0:
            return "closed"
        return "open" if now < self.open_until else "half_open"

    def succeeded(self, now: float) -> None:
        """A request came to its good end."""
        if self.open_until == 0.0:
            self._turn_window(now)
            self._good += 1
            self._streak = self._openings = self.missed_probes = 0
        else:
            self.answered(now)

    def answered(self, now: float) -> None:
        """A request got an answer, whatever will become of it: a trial has succeeded.

        What was sent before the breaker opened proves nothing about now.
        """
        if self.open_until != 0.0 and (self.trials or now >= self.open_until):
            self.open_until = 0.0
            self._by_probe = self._belied = False
            self.missed_probes = 0
            self._clear()

    def failed(self, now: float, *, at_once: bool = False) -> bool:
        """A request failed by the endpoint's fault. ``at_once``: one such failure is enough. Whether it opened now."""
        if self.open_until != 0.0:
            if now < self.open_until:
                return False  # it was sent before, or in want of any better
            self._belied = self._by_probe
            self._open(now)
            return True
        self._turn_window(now)
        self._bad += 1
        self._streak += 1
        bad = self._bad + self._was_bad
        requests = bad + self._good + self._was_good
        too_many = requests >= LEAST_REQUESTS and bad >= FAILURE_SHARE * requests
        if at_once or too_many or self._streak >= FAILURES_IN_A_ROW:
            self._open(now)
            return True
        return False

    def probed(self, now: float, *, alive: bool) -> None:
        """A probe's outcome. One that succeeds ends the cool-down; one that fails begins it anew.

        A probe that was belied by the trial behind it is believed no more until the breaker closes.
        """
        self.missed_probes = 0 if alive else self.missed_probes + 1
        if not alive:
            if self.open_until != 0.0 or self.missed_probes >= MISSED_PROBES:
                self._by_probe = False
                self._open(now)
        elif now < self.open_until and not self._belied:
            self.open_until = now
            self._by_probe = True

    def _open(self, now: float) -> None:
        cool_down = min(LONGEST_COOL_DOWN_S, COOL_DOWN_S * 2.0 ** min(self._openings, 10))
        self._openings += 1
        self.open_until = now + cool_down * self._random.uniform(1 - JITTER, 1 + JITTER)
        self._clear()

    def _turn_window(self, now: float) -> None:
        """Counts are kept for two halves of the window, of which the older one is dropped at a time."""
        age = now - self._began
        if age >= WINDOW_S / 2:
            fresh = age < WINDOW_S
            self._was_good, self._was_bad = (self._good, self._bad) if fresh else (0, 0)
            self._good = self._bad = 0
            self._began = now
