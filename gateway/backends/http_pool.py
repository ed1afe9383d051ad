"""Connections to backends: made when none is idle, and kept for a moment after an answer. As many as are wanted."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Final

import aiohappyeyeballs

from gateway.backends.http_connection import Connection, Origin
from gateway.backends.name_lookup import NameLookup

IDLE_CONNECTION_S: Final = 3.0
"""Shorter than the 5 s after which uvicorn closes an idle connection, so that we seldom write into a closing one."""
NEXT_ADDRESS_S: Final = 0.25
"""Until another address of the name is tried beside one that does not answer (RFC 8305)."""
_LEAST_SWEEP_S: Final = 0.25


class Pool:
    """One timer closes what idles too long, whatever the number of connections."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._names = NameLookup(loop)
        self._tls: ssl.SSLContext | None = None
        self._open: set[Connection] = set()
        self._idle: dict[Origin, deque[Connection]] = {}
        """The one that was used last is the last."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    def take(self, origin: Origin) -> Connection | None:
        """An idle connection, if there is one."""
        idle = self._idle.get(origin)
        if not idle:
            return None
        fresh = self._loop.time() - IDLE_CONNECTION_S
        while idle:
            connection = idle.pop()
            if connection.usable:
                if connection.idle_since > fresh and connection.quiet:
                    return connection
                connection.abort()
        return None

    async def connect(self, origin: Origin, within_s: float) -> Connection:
        """``within_s``: for look-up of the name, TCP and TLS together. Raises OSError, TimeoutError among them, and
        ValueError."""
        connection = Connection(origin, self._loop, released=self._release, lost=self._open.discard)
        self._open.add(connection)
        try:
            async with asyncio.timeout(within_s):
                addresses = await self._names.addresses(origin.host, origin.port)
                tls = await self._tls_context() if origin.secure else None
                socket = await aiohappyeyeballs.start_connection(
                    addresses, happy_eyeballs_delay=NEXT_ADDRESS_S, loop=self._loop
                )
                await self._loop.create_connection(
                    lambda: connection,
                    sock=socket,
                    ssl=tls,
                    # Certificates name hosts without the dot at the end of an absolute name.
                    server_hostname=None if tls is None else origin.host.rstrip("."),
                )
            if self._closed or not connection.usable:
                raise ConnectionAbortedError("closed while connecting")
        except BaseException as fault:
            self._open.discard(connection)
            connection.abort()
            if isinstance(fault, RuntimeError):  # so uvloop says of some sockets that cannot be connected
                raise OSError(str(fault)) from fault
            raise
        return connection

    def close(self) -> None:
        """All connections, and what still connects. Waits for none."""
        self._closed = True
        self._idle.clear()
        self._names.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._open):
            connection.abort()

    async def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            # The authorities' certificates are read from files, which takes a while.
            self._tls = await asyncio.to_thread(_create_tls_context)
        return self._tls

    def _release(self, connection: Connection) -> None:
        if self._closed:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        idle = self._idle.get(connection.origin)
        if idle is None:
            idle = self._idle[connection.origin] = deque()
        idle.append(connection)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(IDLE_CONNECTION_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        now = self._loop.time()
        next_at = None
        for origin, idle in list(self._idle.items()):
            while idle and (idle[0].idle_since <= now - IDLE_CONNECTION_S or not idle[0].usable):
                idle.popleft().abort()
            if not idle:
                del self._idle[origin]
            elif next_at is None or idle[0].idle_since < next_at:
                next_at = idle[0].idle_since
        if next_at is not None:
            self._sweeping = self._loop.call_at(max(next_at + IDLE_CONNECTION_S, now + _LEAST_SWEEP_S), self._sweep)


def _create_tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
