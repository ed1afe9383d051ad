"""One connection to one Redis server per process, pipelined by hand.

Commands issued within one turn of the event loop leave in one write, and replies are matched in order. Nothing is
locked and no task is woken to send, so an admission costs a few microseconds of this process's time.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from gateway.admission.redis_wire import (
    Argument,
    Call,
    Connection,
    RedisClient,
    RedisError,
    RedisUnavailable,
    Script,
    pack,
)
from gateway.redis_url import Address

log = logging.getLogger(__name__)


class PipelinedRedis(RedisClient):
    """Commands and scripts over one connection that restores itself.

    After a failure the next call connects anew; calls made meanwhile share that attempt.
    """

    def __init__(
        self,
        url: str | Address,
        *,
        timeout_s: float,
        scripts: Sequence[Script] = (),
        on_connected: Callable[[], None] | None = None,
        on_lost: Callable[[], None] | None = None,
        name: str = "penstock",
    ) -> None:
        """``on_lost``: called when the connection is lost, or none can be made."""
        super().__init__(timeout_s)
        self.address = Address.parse(url) if isinstance(url, str) else url
        self._scripts = tuple(scripts)
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._name = name
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: list[Call] = []
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def send(self, call: Call) -> None:
        """Send a call made elsewhere; of several, in this order."""
        if self._closed:
            call.fail(RedisUnavailable("closed", unsent=True))
        elif self._connection is not None:
            self._connection.send(call.packed, call)
        else:
            self._waiting.append(call)
            self.connect()

    def connect(self) -> None:
        """Begin to connect, if need be."""
        if self._connection is None and self._connecting is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._connecting = loop.create_task(self._connect(), name=f"connect {self._name}")

    async def flushed(self, key: str | None = None) -> bool:
        return self._connection is not None and await self._connection.flushed()

    async def close(self) -> None:
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort("closed")

    def _submit(self, key: Argument | None, packed: bytes, whole: Callable[[], bytes] | None) -> asyncio.Future[Any]:
        call = self._call(packed, whole)
        self.send(call)
        return call.future

    async def _connect(self) -> None:
        connection: Connection | None = None
        fault: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._open()
                await self._log_in(connection)
        except (TimeoutError, OSError, RedisUnavailable, RedisError) as caught:
            reason = "no answer in time" if isinstance(caught, TimeoutError) else str(caught)
            fault = RedisUnavailable(f"Redis at {self.address} cannot be used: {reason}", unsent=True)
        finally:
            self._connecting = None
            waiting, self._waiting = self._waiting, []
            if fault is None and connection is not None and not connection.lost and not self._closed:
                self._connection = connection
                for call in waiting:
                    connection.send(call.packed, call)
            else:
                if connection is not None:
                    connection.abort("not logged in")
                for call in waiting:
                    call.fail(fault or RedisUnavailable("the connection was lost", unsent=True))
        if self._connection is None:
            self._tell_lost()
        elif self._on_connected is not None:
            self._on_connected()

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()

        def protocol() -> Connection:
            return Connection(loop, self._lost)

        address = self.address
        if address.path is not None:
            return (await loop.create_unix_connection(protocol, address.path))[1]
        context = ssl.create_default_context() if address.tls else None
        return (await loop.create_connection(protocol, address.host, address.port, ssl=context))[1]

    async def _log_in(self, connection: Connection) -> None:
        address = self.address
        steps: list[tuple[Argument, ...]] = []
        if address.password is not None:
            named = () if address.username is None else (address.username,)
            steps.append(("AUTH", *named, address.password))
        if address.database:
            steps.append(("SELECT", address.database))
        steps.append(("CLIENT", "SETNAME", self._name))
        steps.extend(("SCRIPT", "LOAD", script.source) for script in self._scripts)
        calls = [self._call(pack(step), None) for step in steps]
        for call in calls:
            connection.send(call.packed, call)
        for reply in await asyncio.gather(*(call.future for call in calls), return_exceptions=True):
            if isinstance(reply, BaseException):
                raise reply

    def _lost(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
            if not self._closed:
                log.warning("the connection to Redis at %s was lost", self.address)
                self._tell_lost()

    def _tell_lost(self) -> None:
        if self._on_lost is not None and not self._closed:
            self._on_lost()
