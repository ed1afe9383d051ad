"""Single flight: of identical questions that run at the same time in this process, one is asked, the others wait."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from gateway.cache.entry import Entry
from gateway.clock import Clock

LONGEST_S: Final = 60.0
"""A flight that takes longer is followed by nobody any more."""


class Flight:
    """One answer on its way. Ends once: with an entry, or without, which sets its followers free."""

    def __init__(self, flights: Flights, name: str, began: float) -> None:
        self._flights = flights
        self._end: asyncio.Future[Entry | None] = asyncio.get_running_loop().create_future()
        self.name = name
        self.began = began

    def land(self, entry: Entry | None) -> None:
        if not self._end.done():
            self._end.set_result(entry)
        self._flights.remove(self)

    async def landed(self, limit_s: float) -> Entry | None:
        """What it came to; None: nothing, or not in time."""
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.shield(self._end)
        except TimeoutError:
            return None


class Flights:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: OrderedDict[str, Flight] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def join(self, name: str) -> tuple[Flight, bool]:
        """The flight of that name, and whether the caller leads it: who leads must let it land."""
        now = self._clock.monotonic()
        while self._running and now - (oldest := next(iter(self._running.values()))).began > LONGEST_S:
            oldest.land(None)
        running = self._running.get(name)
        if running is not None:
            return running, False
        flight = self._running[name] = Flight(self, name, now)
        return flight, True

    def remove(self, flight: Flight) -> None:
        if self._running.get(flight.name) is flight:
            del self._running[flight.name]
