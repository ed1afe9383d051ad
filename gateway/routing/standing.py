"""What this replica knows of one endpoint: how much is going on there, and whether it is fit to be used."""

from __future__ import annotations

from random import Random

import msgspec

from gateway.routing.breaker import Breaker, BreakerState
from gateway.routing.route import Endpoint

USABLE, HESITANT, OPEN, BARRED = range(4)
"""Levels, better first. Hesitant: busy without saying for how long, on trial already, or found dead by most replicas.
Barred: it asked to be left alone, and is."""
BUSY_S = 1.0
"""So long comes last what is too busy and does not say for how long."""
UNKNOWN_MODEL_S = 30.0
"""So long an endpoint comes last for a model that it does not serve."""
LONGEST_ASIDE_S = 60.0
"""No endpoint is left alone for longer, whatever it asks for."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint, as an operator may see it."""

    endpoint: str
    pool: str
    in_flight: int
    """Requests of this replica that are there."""
    in_flight_elsewhere: int
    """Of the other replicas, as they last told."""
    breaker: BreakerState
    overruled: bool
    """Most replicas hold it for dead."""
    set_aside_s: float
    """So much longer it is left alone because it said that it is too busy."""
    last_error: str | None
    """Code of the latest failure."""
    last_error_s: float | None
    """How long ago that was."""


class Standing:
    __slots__ = (
        "_aside_until",
        "_failed_at",
        "_told",
        "base_url",
        "breaker",
        "elsewhere",
        "id",
        "in_flight",
        "in_flight_then",
        "last_error",
        "overruled",
        "pool",
        "revision",
        "succeeded_at",
        "unknown_models",
    )

    def __init__(self, endpoint: Endpoint, random: Random) -> None:
        self.id = endpoint.id
        self.in_flight = 0
        self.elsewhere = 0
        """In flight of other replicas, as they last told."""
        self.in_flight_then = 0
        """Of this replica, at that moment."""
        self.overruled = False
        self.breaker = Breaker(random)
        self.renew(endpoint)

    def renew(self, endpoint: Endpoint) -> None:
        """It is another endpoint under the same id: what was learned holds no more, what runs goes on."""
        self.pool = endpoint.pool
        self.base_url = endpoint.base_url
        self.revision = endpoint.revision
        self.breaker.reset()
        self.last_error: str | None = None
        self.succeeded_at: float | None = None
        self.unknown_models: dict[str, float] = {}
        """Models that it does not serve, and until when that is believed."""
        self._failed_at = 0.0
        self._aside_until = 0.0
        self._told = False

    def level(self, now: float) -> int:
        if self._aside_until > now:
            return BARRED if self._told else HESITANT
        open_until = self.breaker.open_until
        if open_until == 0.0:
            return HESITANT if self.overruled else USABLE
        if open_until > now:
            return OPEN
        return HESITANT if self.breaker.trials else USABLE

    def level_for(self, model: str, now: float) -> int:
        return OPEN if self.unknown_models.get(model, 0.0) > now else self.level(now)

    def note_unknown(self, model: str, now: float) -> None:
        """It does not serve ``model``."""
        self.unknown_models = {name: until for name, until in self.unknown_models.items() if until > now}
        self.unknown_models[model] = now + UNKNOWN_MODEL_S

    def load(self, echo: float) -> float:
        """Requests in flight, others' too. ``echo``: what others began since they told, for each one begun here."""
        if not echo:
            return self.in_flight + self.elsewhere
        return self.in_flight + max(0.0, self.elsewhere + echo * (self.in_flight - self.in_flight_then))

    def set_aside(self, now: float, retry_after_s: float | None) -> None:
        """It is too busy. ``retry_after_s``: how long it wants to be left alone, if it said so."""
        told = retry_after_s is not None
        seconds = BUSY_S if retry_after_s is None else min(max(retry_after_s, 0.0), LONGEST_ASIDE_S)
        if told >= self._told or now >= self._aside_until:  # what was told outranks what was guessed
            self._aside_until, self._told = max(now + seconds, self._aside_until), told

    def aside_s(self, now: float) -> float:
        """How long it is still to be left alone."""
        return max(0.0, self._aside_until - now)

    def note_failure(self, now: float, code: str) -> None:
        self.last_error, self._failed_at = code, now

    def health(self, now: float) -> Health:
        return Health(
            endpoint=self.id,
            pool=self.pool,
            in_flight=self.in_flight,
            in_flight_elsewhere=self.elsewhere,
            breaker=self.breaker.state(now),
            overruled=self.overruled,
            set_aside_s=round(self.aside_s(now), 3),
            last_error=self.last_error,
            last_error_s=None if self.last_error is None else round(now - self._failed_at, 3),
        )


class InUse:
    """Counts one request in flight, and one trial if the breaker was not closed when it began."""

    __slots__ = ("_standing", "_trial")

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._trial = False

    def begin(self) -> None:
        self._standing.in_flight += 1
        if self._standing.breaker.open_until != 0.0:
            self._trial = True
            self._standing.breaker.trials += 1

    def end(self) -> None:
        self._standing.in_flight -= 1
        if self._trial:
            self._standing.breaker.trials -= 1

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()
