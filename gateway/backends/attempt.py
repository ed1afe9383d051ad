"""One backend, asked once: from the connection to the last byte of its answer."""

from __future__ import annotations

import asyncio

from gateway.backends import faults
from gateway.backends.alarm import Alarm
from gateway.backends.backend import Backend, Order, Outgoing, Reader, Reading
from gateway.backends.decompression import PIECE
from gateway.backends.faults import BackendFault
from gateway.backends.retry_after import finest
from gateway.backends.time_limits import TimeLimits
from gateway.backends.transport import Reply, Transport
from gateway.routing.route import Endpoint
from worker.protocol.sse import MEDIA_TYPE

ERROR_BODY_LIMIT = 64 * 1024
ERROR_BODY_S = 5.0
"""For the body of an error to arrive; its status tells enough without."""


class Attempt:
    """Begins with the first pull, and goes on while nobody pulls. Whoever makes it must ``close`` it.

    What reaches the backend runs in a task of the attempt's own, so that a pull may end, its time being over, while
    the backend has not even sent the head of its answer; unless nobody would pull again.
    """

    def __init__(
        self,
        transport: Transport,
        backend: Backend,
        order: Order,
        endpoint: Endpoint,
        outgoing: Outgoing,
        limits: TimeLimits,
    ) -> None:
        self.endpoint = endpoint
        self.answering = False
        """Whether the backend told anything of an answer yet."""
        self._transport = transport
        self._backend = backend
        self._order = order
        self._outgoing = outgoing
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop)
        self._began = self._heard = self._loop.time()
        self._reaching: asyncio.Task[None] | None = None
        self._reply: Reply | None = None
        self._reader: Reader | None = None
        self._at_once = 0
        """Bytes read since the event loop was last given way to."""
        self._left_over: BackendFault | None = None

    def age_s(self) -> float:
        return self._loop.time() - self._began

    async def pull(self, until: float, *, last: bool = False) -> Reading | None:
        """What one read came to, perhaps nothing; None when ``until`` (loop time) passed. Raises BackendFault.

        ``last``: when it has passed, there is no other pull. It works on one piece at most, and gives way to others
        after each.
        """
        if self._left_over is not None:
            raise self._left_over
        if self._reader is None:
            if not await (self._reached_at_last(until) if last else self._reached(until)):
                return None
            assert self._reader is not None
        assert self._reply is not None
        if self._at_once >= PIECE:
            self._at_once = 0
            await asyncio.sleep(0)
        silent_at = self._silent_at()
        if self._reply.came:
            chunk = await self._reply.read_some()
        else:
            try:
                with self._alarm.at(min(until, silent_at)):
                    chunk = await self._reply.read_some()
            except TimeoutError:
                if silent_at <= until:
                    raise self._silent() from None
                return None
        self._heard = self._loop.time()
        self._at_once += len(chunk)
        reading = self._reader.feed(chunk) if chunk else self._reader.end()
        self._left_over = reading.fault
        if not self.answering:
            # A JSON body is read as one event, at its end.
            is_whole = self._reply.media_type != MEDIA_TYPE
            self.answering = bool(reading.events) or reading.usage is not None or is_whole
            if not self.answering and reading.fault is None and self._heard >= silent_at:
                raise self._silent()
        return reading

    async def finish(self) -> None:
        """After a complete answer: keep the connection for another request, if its end comes soon."""
        if self._reply is not None:
            await self._reply.finish()

    async def close(self) -> None:
        """Drop the connection unless the whole answer was read: the backend sees the close at once."""
        self._alarm.close()
        try:
            if self._reaching is not None:
                self._reaching.cancel()
                await _ended(self._reaching)
        finally:
            if self._reply is not None:
                self._reply.close()

    async def _reached_at_last(self, until: float) -> bool:
        """As ``_reached``, where it is given up when ``until`` has passed."""
        if self._reaching is not None:
            return await self._reached(until)
        silent_at = self._silent_at()
        try:
            with self._alarm.at(min(until, silent_at)):
                await self._reach()
        except TimeoutError:
            if silent_at <= until:
                raise self._silent() from None
            return False
        return True

    async def _reached(self, until: float) -> bool:
        """Whether the backend began to answer. Raises BackendFault."""
        if self._reaching is None:
            self._reaching = self._loop.create_task(self._reach())
        silent_at = self._silent_at()
        wait_s = min(until, silent_at) - self._loop.time()
        await asyncio.wait((self._reaching,), timeout=max(0.0, wait_s))
        if self._reaching.done():
            self._reaching.result()
            return True
        if silent_at <= until:
            raise self._silent()
        return False

    async def _reach(self) -> None:
        """Send the request and wait for the head of an answer. Raises BackendFault."""
        outgoing = self._outgoing
        reply = self._reply = await self._transport.post(
            outgoing.url, headers=outgoing.headers, body=outgoing.body, connect_s=self._limits.connect_s
        )
        if reply.status != 200:
            raise await self._refusal(reply)
        self._reader = self._backend.reader(self._order, self.endpoint, reply.media_type)

    async def _refusal(self, reply: Reply) -> BackendFault:
        if reply.status < 400:
            # A redirect would take the request, with its secrets, to who knows where.
            return faults.malformed(f"answered with status {reply.status}, which is no answer to this")
        try:
            async with asyncio.timeout(ERROR_BODY_S):
                body = await reply.read_limited(ERROR_BODY_LIMIT)
        except (BackendFault, TimeoutError):
            body = None
        retry_after = finest(reply.header("retry-after"), reply.header("retry-after-ms"))
        return self._backend.refusal(self.endpoint, reply.status, body, retry_after)

    def _silent_at(self) -> float:
        return self._heard + self._limits.idle_s if self.answering else self._began + self._limits.first_byte_s

    def _silent(self) -> BackendFault:
        return faults.silent(self._limits.idle_s if self.answering else self._limits.first_byte_s)


async def _ended(task: asyncio.Task[None]) -> None:
    """Wait for a task that was cancelled, also when cancelled meanwhile: nothing of it may outlive its owner."""
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as cancelled:
            interrupted = cancelled
    if not task.cancelled():
        task.exception()  # It was told by pull, or matters to nobody any more.
    if interrupted is not None:
        raise interrupted
