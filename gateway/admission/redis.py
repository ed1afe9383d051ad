"""One connection to Redis per process, pipelined by hand.

Commands issued within one turn of the event loop leave in one write, and replies are matched in order. Nothing is
locked and no task is woken to send, so an admission costs a few microseconds of this process's time.

Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from importlib import resources
from typing import Any, cast
from urllib.parse import parse_qs, unquote, urlsplit

import hiredis

log = logging.getLogger(__name__)

Argument = bytes | str | int
_GRACE_S = 0.01

# Errors of a server that cannot serve now; they pass without a change of ours. Nothing was done.
_TRANSIENT = ("LOADING", "MASTERDOWN", "BUSY ", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "OOM", "MISCONF", "NOREPLICAS")


class RedisUnavailable(Exception):
    """Redis did not answer in time, or not at all. What was asked may have been done, unless ``unsent``.

    ``retry_after_s`` is when asking again makes sense.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, unsent: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.unsent = unsent


class RedisError(Exception):
    """Redis answered with an error: a fault in a command or a script, or a server that refuses to write."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the SHA-1 by which Redis knows it."""

    name: str
    source: bytes
    sha: bytes


def _pack(arguments: tuple[Argument, ...]) -> bytes:
    return cast(bytes, hiredis.pack_command(cast(Any, arguments)))


def load_script(name: str) -> Script:
    """The script ``<name>.lua`` beside this file."""
    source = resources.files("gateway.admission").joinpath(f"{name}.lua").read_bytes()
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


@dataclass(frozen=True, slots=True)
class Address:
    """Where Redis is and how to log in, as read from a ``redis://``, ``rediss://`` or ``unix://`` URL."""

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    tls: bool = False
    username: str | None = None
    password: str | None = None
    database: int = 0

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises ValueError, without any of the URL in its text."""
        try:
            return cls._parse(url)
        except ValueError:
            raise ValueError(
                "REDIS_URL is no Redis URL; write redis://:password@host:6379/0 (or rediss://, or "
                "unix://:password@/path?db=0), and in the password %2F for /, %23 for #, %3F for ?, %40 for @"
            ) from None

    @classmethod
    def _parse(cls, url: str) -> Address:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(parts.scheme)
        if "@" in parts.path + parts.query + parts.fragment:
            raise ValueError("a sign in the password that ends the host's part of a URL")
        username = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password else None
        query = parse_qs(parts.query)
        unix = parts.scheme == "unix"
        named = query.get("db", [""])[0] or ("" if unix else parts.path.strip("/"))
        if named and not named.isdecimal():
            raise ValueError(named)
        database = int(named or 0)
        if unix:
            return cls(path=unquote(parts.path), username=username, password=password, database=database)
        return cls(
            host=parts.hostname or "localhost",
            port=parts.port or 6379,
            tls=parts.scheme == "rediss",
            username=username,
            password=password,
            database=database,
        )

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class _Call:
    """One command in flight. ``fallback`` is sent instead if Redis does not know the script."""

    __slots__ = ("deadline", "fallback", "future")

    def __init__(self, future: asyncio.Future[Any], deadline: float, fallback: Callable[[], bytes] | None) -> None:
        self.future = future
        self.deadline = deadline
        self.fallback = fallback


class _Connection(asyncio.Protocol):
    """The wire: packs commands into one write per loop turn and hands each reply to the call that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[_Connection], None]) -> None:
        self._loop = loop
        self._on_lost = on_lost
        self._reader = hiredis.Reader()
        self._calls: deque[_Call] = deque()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._overdue: _Call | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, packed: bytes, call: _Call) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(packed)
        self._calls.append(call)
        if self._watch is None:
            self._watch = self._loop.call_at(call.deadline, self._check_deadline)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport is not None and not self.lost:
            self._transport.write(b"".join(out))

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        try:
            while True:
                reply = reader.gets()
                if reply is False:
                    return
                self._deliver(reply)
        except (hiredis.ProtocolError, IndexError) as fault:
            self.abort(f"Redis spoke out of turn: {fault}")

    def _deliver(self, reply: Any) -> None:
        call = self._calls.popleft()
        if isinstance(reply, hiredis.ReplyError):
            text = str(reply)
            if call.fallback is not None and text.startswith("NOSCRIPT"):
                source, call.fallback = call.fallback, None
                self.send(source(), call)
                return
            if not call.future.done():
                transient = text.startswith(_TRANSIENT)
                call.future.set_exception(RedisUnavailable(text, unsent=True) if transient else RedisError(text))
        elif not call.future.done():
            call.future.set_result(reply)

    def _check_deadline(self) -> None:
        # Replies come in order: when the oldest is late, the whole connection is stuck.
        self._watch = None
        if not self._calls:
            return
        oldest = self._calls[0]
        if oldest.deadline > self._loop.time():
            self._watch = self._loop.call_at(oldest.deadline, self._check_deadline)
        elif oldest is not self._overdue:
            # If this process itself was held up, the reply may lie in the socket: let the loop read it first.
            self._overdue = oldest
            self._watch = self._loop.call_later(_GRACE_S, self._check_deadline)
        else:
            self.abort("Redis does not answer")

    def connection_lost(self, exc: Exception | None) -> None:
        self.abort(f"the connection to Redis was lost: {exc or 'closed by the server'}")

    def abort(self, reason: str) -> None:
        """Give the connection up; every call on it fails."""
        if self.lost:
            return
        self.lost = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            self._transport.abort()
        calls, self._calls = self._calls, deque()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(RedisUnavailable(reason))
        self._on_lost(self)


class PipelinedRedis:
    """Commands and scripts over one connection that restores itself.

    Every call is answered, or fails with RedisUnavailable, within ``timeout_s``. After a failure the next call
    connects anew; calls made meanwhile share that attempt.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        scripts: Sequence[Script] = (),
        on_connected: Callable[[], None] | None = None,
        name: str = "penstock",
    ) -> None:
        self._address = Address.parse(url)
        self._timeout_s = timeout_s
        self._scripts = tuple(scripts)
        self._on_connected = on_connected
        self._name = name
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._waiting: list[tuple[bytes, _Call]] = []
        self._closed = False
        self.time_offset_ms = 0
        """Added to Redis' time by the scripts of this package. Only tests set it."""

    async def command(self, *arguments: Argument) -> Any:
        """One command; its reply as bytes, int, list or None. Raises RedisUnavailable, RedisError."""
        return await self.issue(*arguments)

    def issue(self, *arguments: Argument) -> asyncio.Future[Any]:
        """As ``command``, without waiting: the command leaves even if nobody awaits the future."""
        return self._submit(_pack(arguments), None)

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> asyncio.Future[Any]:
        """Run a script by its SHA-1; sends its source if Redis does not know it. Not to be awaited to take effect."""
        tail = (len(keys), *keys, *arguments)
        packed = _pack(("EVALSHA", script.sha, *tail))
        return self._submit(packed, lambda: _pack(("EVAL", script.source, *tail)))

    async def close(self) -> None:
        """Drop the connection. Calls in flight fail."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._connection is not None:
            self._connection.abort("closed")

    def _submit(self, packed: bytes, fallback: Callable[[], bytes] | None) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if self._closed:
            future.set_exception(RedisUnavailable("closed", unsent=True))
            return future
        call = _Call(future, loop.time() + self._timeout_s, fallback)
        if self._connection is not None:
            self._connection.send(packed, call)
        else:
            self._waiting.append((packed, call))
            if self._connecting is None:
                self._connecting = loop.create_task(self._connect(), name=f"connect {self._name}")
        return future

    async def _connect(self) -> None:
        connection: _Connection | None = None
        fault: Exception | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._open()
                await self._log_in(connection)
        except (TimeoutError, OSError, RedisUnavailable, RedisError) as caught:
            reason = "no answer in time" if isinstance(caught, TimeoutError) else str(caught)
            fault = RedisUnavailable(f"Redis at {self._address} cannot be used: {reason}", unsent=True)
        finally:
            self._connecting = None
            waiting, self._waiting = self._waiting, []
            if fault is None and connection is not None and not connection.lost and not self._closed:
                self._connection = connection
                for packed, call in waiting:
                    connection.send(packed, call)
            else:
                if connection is not None:
                    connection.abort("not logged in")
                for _, call in waiting:
                    if not call.future.done():
                        call.future.set_exception(fault or RedisUnavailable("the connection was lost", unsent=True))
        if self._connection is not None and self._on_connected is not None:
            self._on_connected()

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()

        def protocol() -> _Connection:
            return _Connection(loop, self._lost)

        address = self._address
        if address.path is not None:
            return (await loop.create_unix_connection(protocol, address.path))[1]
        context = ssl.create_default_context() if address.tls else None
        return (await loop.create_connection(protocol, address.host, address.port, ssl=context))[1]

    async def _log_in(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        address = self._address
        steps: list[tuple[Argument, ...]] = []
        if address.password is not None:
            named = () if address.username is None else (address.username,)
            steps.append(("AUTH", *named, address.password))
        if address.database:
            steps.append(("SELECT", address.database))
        steps.append(("CLIENT", "SETNAME", self._name))
        steps.extend(("SCRIPT", "LOAD", script.source) for script in self._scripts)
        futures: list[asyncio.Future[Any]] = []
        for step in steps:
            future: asyncio.Future[Any] = loop.create_future()
            connection.send(_pack(step), _Call(future, loop.time() + self._timeout_s, None))
            futures.append(future)
        replies = await asyncio.gather(*futures, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply

    def _lost(self, connection: _Connection) -> None:
        if self._connection is connection:
            self._connection = None
            if not self._closed:
                log.warning("the connection to Redis at %s was lost", self._address)
