"""Two translators, one behind the other."""

from __future__ import annotations

from gateway.ask import Translator


class Chain:
    """A ``Translator`` into the words of ``second``, from those that ``first`` reads."""

    def __init__(self, first: Translator, second: Translator) -> None:
        self._first = first
        self._second = second

    def event(self, data: bytes) -> list[bytes]:
        return self._through(self._first.event(data))

    def end(self) -> list[bytes]:
        return self._through(self._first.end()) + self._second.end()

    def whole(self, body: bytes) -> bytes:
        return self._second.whole(self._first.whole(body))

    def _through(self, events: list[bytes]) -> list[bytes]:
        return [found for each in events for found in self._second.event(each)]
