"""How the gateway is served: HTTP/1.1, and WebSockets on the one path that has them."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn._types import ASGISendEvent
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame
from websockets.http11 import Request

from gateway.http.websocket import PATH, STOP
from gateway.settings import Settings
from worker.protocol.http_server import HttpProtocol

KEEP_ALIVE_S: Final = 75
"""How long an idle connection is kept: longer than proxies keep theirs, which else write into one that is closing."""
PING_INTERVAL_S: Final = 20.0
PONG_WITHIN_S: Final = 60.0
"""A client that is slow to read finds a ping only behind all that was sent before it."""
_FAREWELL_S: Final = 1.0
"""How long an ended connection may take to send what is left."""


class GatewayProtocol(HttpProtocol):
    def accepts_upgrade(self) -> bool:
        return self.url.partition(b"?")[0] == PATH.encode()

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        protocol = self.transport.get_protocol()
        if isinstance(protocol, WebSocketProtocol) and not protocol.handshake_initiated:
            # Its parser takes fewer and shorter headers than that of HTTP, and says nothing.
            self.send_400_response("The WebSocket's handshake cannot be read.")


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection. Its application hears of a stop of the server, and is left to end what runs."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # Else it logs headers and messages wherever debugging is on: keys and prompts.
        self.conn.debug = False
        self._stop = asyncio.Event()
        self._abort: asyncio.TimerHandle | None = None
        self._rest = bytearray()
        """Of a message that comes in fragments, all but the first: there may be millions, with nothing in them."""
        self._pongs = b""
        """To the last pings, of a client that does not read at the moment; they are owed to no others (RFC 6455,
        section 5.5.3)."""

    def handle_cont(self, event: Frame) -> None:
        self._rest += event.data
        if event.fin:
            self.frames.append(bytes(self._rest))
            self._rest.clear()
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self._pongs = b"".join(self.conn.data_to_send())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._pongs:
            self.transport.write(self._pongs)
            self._pongs = b""

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            # The application has not begun yet: its task was made just now.
            cast(dict[str, Any], self.scope["extensions"])[STOP] = {"asked": self._stop}

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # A refusal is an answer, too. uvicorn would log it as a fault of the application.
            self.handshake_complete = True

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            # A client that does not answer the closing must not hold up the stop.
            self.close_timeout = _FAREWELL_S
            self._stop.set()
        else:
            super().shutdown()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            # A client that does not read would hold what was written last for ever.
            patience_s = _FAREWELL_S + (0.0 if self.close_timer is None else self.close_timeout)
            self._abort = self.loop.call_later(patience_s, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._abort is not None:
            self._abort.cancel()
        super().connection_lost(exc)


def server_config(app: Any, settings: Settings, **changes: Any) -> Config:
    """``changes``: other arguments of ``uvicorn.Config``."""
    arguments: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "http": GatewayProtocol,
        "ws": WebSocketProtocol,
        "ws_max_size": settings.max_body_bytes,
        "ws_ping_interval": PING_INTERVAL_S,
        "ws_ping_timeout": PONG_WITHIN_S,
        "ws_per_message_deflate": False,
        "lifespan": "on",
        "proxy_headers": False,  # nothing goes by who called: keys tell
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
    }
    return Config(app, **(arguments | changes))
