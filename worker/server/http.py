"""uvicorn, run by us: our socket, our signals, our end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Final

import uvicorn

from worker.protocol.http_server import HttpProtocol

_LAST_ANSWERS_S: Final = 2
"""How long, once told to stop, answers in flight get to end; then their connections are cut."""
_KEEP_ALIVE_S: Final = 75
"""How long an idle connection is kept: longer than clients keep theirs, or a request may meet the closing."""


class HttpServer:
    """Serves one ASGI application on one socket."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
        )
        self._server = _Server(config)

    async def serve(self, bound: socket.socket) -> None:
        """Listen on ``bound`` until ``stop``; closes it."""
        await self._server.serve(sockets=[bound])

    async def wait_started(self) -> None:
        """Return once connections are accepted."""
        await self._server.listening.wait()

    def stop(self) -> None:
        """Take no more connections, let answers in flight end for a moment, then return from ``serve``."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals mean draining first, which is not uvicorn's to do."""
        yield
