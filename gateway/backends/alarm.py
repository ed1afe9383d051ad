"""A time limit for many waits in a row."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any


class Alarm:
    """As ``asyncio.timeout_at``, over and over: ``with alarm.at(when): ...`` raises TimeoutError once ``when`` passed.

    Its timer is not set and cancelled for each wait, which takes longer than what is waited for; it goes on until it
    rings, and is set anew if the wait of that moment has longer. ``close`` stops it.
    """

    __slots__ = ("_cancelling", "_loop", "_rang", "_task", "_timer", "_until")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._until = 0.0
        self._task: asyncio.Task[Any] | None = None
        """Which waits."""
        self._cancelling = 0
        self._rang = False

    def at(self, when: float) -> Alarm:
        """``when``: by the loop's clock."""
        self._until = when
        return self

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def __enter__(self) -> None:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._rang = False
        if self._timer is None or self._until < self._timer.when():
            self.close()
            self._timer = self._loop.call_at(self._until, self._ring)

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if not self._rang or task is None or task.uncancel() > self._cancelling:
            return
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from fault

    def _ring(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._ring)
            return
        self._rang = True
        self._task.cancel()
