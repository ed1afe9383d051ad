"""An answer that is never streamed: one event is all of it."""

from __future__ import annotations

from gateway.billing.usage import TokenUsage


class SingleAssembler:
    """An ``Assembler``."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._whole: bytes | None = None
        self.over = False

    def feed(self, event: bytes) -> None:
        self.over = len(event) > self._limit
        self._whole = None if self.over else event

    def whole(self, usage: TokenUsage | None) -> bytes | None:
        return self._whole
