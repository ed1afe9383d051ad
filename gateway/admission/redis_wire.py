"""The wire to one Redis server: commands packed into one write per turn of the event loop, replies matched in order.

Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha1
from importlib import resources
from typing import Any, cast

import hiredis

Argument = bytes | str | int
_GRACE_S = 0.01
_PROMPT_S = 0.1
"""A server that has owed an answer for so long is taken to hang."""

# Errors of a server that cannot serve now; they pass without a change of ours. Nothing was done.
_TRANSIENT = ("LOADING", "MASTERDOWN", "BUSY ", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "OOM", "MISCONF", "NOREPLICAS")
# By these a node of a cluster says that another has the key, or that it may be asked again in a moment.
_ELSEWHERE = ("MOVED ", "ASK ", "CLUSTERDOWN", "TRYAGAIN")


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


def load_script(name: str) -> Script:
    """The script ``<name>.lua`` beside this file."""
    source = resources.files("gateway.admission").joinpath(f"{name}.lua").read_bytes()
    return Script(name, source, sha1(source, usedforsecurity=False).hexdigest().encode())


def pack(arguments: tuple[Argument, ...]) -> bytes:
    return cast(bytes, hiredis.pack_command(cast(Any, arguments)))


class Call:
    """One command in flight. ``whole`` packs what is sent instead if Redis does not know the script.

    ``reroute`` is told of an error by which a cluster's node sends the asker elsewhere; it says whether it took the
    call over. ``slot``: of the call's key, in a cluster.
    """

    __slots__ = ("deadline", "future", "hops", "packed", "reroute", "slot", "whole")

    def __init__(
        self,
        future: asyncio.Future[Any],
        deadline: float,
        packed: bytes,
        whole: Callable[[], bytes] | None = None,
    ) -> None:
        self.future = future
        self.deadline = deadline
        self.packed = packed
        self.whole = whole
        self.reroute: Callable[[Call, str], bool] | None = None
        self.slot: int | None = None
        self.hops = 0

    def fail(self, fault: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(fault)


class RedisClient(ABC):
    """Commands and scripts for a Redis, of one server or many.

    Every call is answered, or fails with RedisUnavailable, within ``timeout_s``. It leaves even if nobody awaits it.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of the first call, and of all others: to ask which one runs is a system call each time."""
        self.time_offset_ms = 0
        """Added to Redis' time by the scripts of this package. Only tests set it."""

    async def command(self, *arguments: Argument) -> Any:
        """One command; its reply as bytes, int, list or None. Raises RedisUnavailable, RedisError.

        In a cluster it goes where its first argument is a key of; without arguments, to any node.
        """
        return await self.issue(*arguments)

    def issue(self, *arguments: Argument) -> asyncio.Future[Any]:
        """As ``command``, without waiting."""
        return self._submit(arguments[1] if len(arguments) > 1 else None, pack(arguments), None)

    def command_at(self, key: str, *arguments: Argument) -> asyncio.Future[Any]:
        """A command that bears no key, or not first: to the server that has ``key``."""
        return self._submit(key, pack(arguments), None)

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> asyncio.Future[Any]:
        """Run a script by its SHA-1; sends its source if Redis does not know it. Its keys share one slot."""
        tail = (len(keys), *keys, *arguments)
        packed = pack(("EVALSHA", script.sha, *tail))
        return self._submit(keys[0], packed, lambda: pack(("EVAL", script.source, *tail)))

    def _call(self, packed: bytes, whole: Callable[[], bytes] | None) -> Call:
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        return Call(loop.create_future(), loop.time() + self._timeout_s, packed, whole)

    @abstractmethod
    def _submit(
        self, key: Argument | None, packed: bytes, whole: Callable[[], bytes] | None
    ) -> asyncio.Future[Any]: ...

    @abstractmethod
    async def flushed(self, key: str) -> bool:
        """Wait until all that was asked of the server of ``key`` before has left this process, which takes a turn of
        the event loop. False: it has not, since the server cannot be reached or hangs."""

    @abstractmethod
    async def close(self) -> None:
        """Drop all connections. Calls in flight fail."""


class Connection(asyncio.Protocol):
    """One connection. Each reply goes to the call that waits for it; when one is late, all fail."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[Connection], None]) -> None:
        self._loop = loop
        self._on_lost = on_lost
        self._reader = hiredis.Reader()
        self._calls: deque[Call] = deque()
        self._out: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._overdue: Call | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, packed: bytes, call: Call) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(packed)
        self._calls.append(call)
        if self._watch is None:
            self._watch = self._loop.call_at(call.deadline, self._check_deadline)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and self._transport is not None and not self.lost:
            self._transport.write(b"".join(out))

    async def flushed(self) -> bool:
        """See ``RedisClient.flushed``."""
        self._flush()
        await asyncio.sleep(0)  # the transport itself may write at the end of a turn
        if self.lost or self._transport is None or self._hangs:
            return False
        return not self._transport.get_write_buffer_size()  # what it holds back the server has not taken

    @property
    def _hangs(self) -> bool:
        calls = self._calls
        return bool(calls) and calls[-1].deadline - calls[0].deadline > _PROMPT_S

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
            self._refuse(call, str(reply))
        elif not call.future.done():
            call.future.set_result(reply)

    def _refuse(self, call: Call, text: str) -> None:
        if call.whole is not None and text.startswith("NOSCRIPT"):
            packed, call.whole = call.whole(), None
            call.packed = packed
            self.send(packed, call)
            return
        if call.reroute is not None and text.startswith(_ELSEWHERE) and call.reroute(call, text):
            return
        transient = text.startswith(_TRANSIENT)
        call.fail(RedisUnavailable(text, unsent=True) if transient else RedisError(text))

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
            call.fail(RedisUnavailable(reason))
        self._on_lost(self)
