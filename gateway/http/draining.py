"""A stop in good order: nothing new is taken, what runs may end or is told that it is cut, and all of it is settled."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType
from typing import Final

import structlog
import uvicorn
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from worker.protocol.errors import ApiError

STILL_ANSWERED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
CUT_WITHIN_S: Final = 3.0
"""For requests that were cut to say so to their clients, and to be settled."""

_log = structlog.get_logger(__name__)


class Drain:
    """What one replica knows of its own stop. ``middleware`` is to stand before all handlers."""

    def __init__(self) -> None:
        self.began = False
        self._running = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    def begin(self) -> None:
        """From now on requests are refused: on connections that are open already, and on those that just came."""
        self.began = True

    def middleware(self, app: ASGIApp) -> ASGIApp:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if self.began and scope["type"] == ScopeType.HTTP and scope["path"] not in STILL_ANSWERED:
                raise refused()
            with self.running():
                await app(scope, receive, send)

        return serve

    def running(self) -> Drain:
        """A context manager for what a stop has to wait for."""
        return self

    def __enter__(self) -> None:
        self._running += 1
        self._quiet.clear()

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if not self._running:
            self._quiet.set()

    async def ended(self) -> None:
        """Wait, but not for long, until no request runs."""
        try:
            async with asyncio.timeout(CUT_WITHIN_S):
                await self._quiet.wait()
        except TimeoutError:
            _log.error("requests_still_run_at_the_end", count=self._running)


class DrainingServer(uvicorn.Server):
    """Tells of a stop as soon as it is asked for: the listener closes a moment later.

    ``started`` is called once, when the application stands and the listener is open.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain, *, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._drain.begin()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain.begin()
        await super().shutdown(sockets)


def refused() -> ApiError:
    return ApiError(
        503,
        "This gateway is stopping and takes no more requests. Send it again: another one takes it.",
        type="server_error",
        code="gateway_stopping",
        headers={"retry-after": "1", "connection": "close"},
    )
