"""From a text to the direction of its meaning: what the semantic tier compares.

Texts that wait at the same time go as one batch, the same text only once; the last ones are remembered. An embedder
makes no promise of time: its caller sets a limit. It is an asynchronous context manager, opened and closed in one task.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self


class EmbedderError(Exception):
    """No vector came; the message says what to do."""


class TooLong(EmbedderError):
    """The text is longer than the model reads: a vector would speak of its beginning only."""


class Busy(EmbedderError):
    """Too many texts wait already."""


class Embedder(Protocol):
    @property
    def name(self) -> str:
        """Of the model; vectors of two names cannot be compared."""

    @property
    def dimensions(self) -> int: ...

    async def embed(self, text: str) -> bytes:
        """A vector of length 1, as float32 in the machine's order. Raises EmbedderError, TooLong and Busy among it."""


class BatchingEmbedder(ABC):
    """What embedders share: waiting, sharing, remembering. Subclasses turn a batch into vectors."""

    name: str
    dimensions: int

    def __init__(self, *, batch: int, at_a_time: int, waiting: int, remembered: int) -> None:
        """``batch``: texts at most in one; ``at_a_time``: batches; ``waiting``: texts; ``remembered``: vectors."""
        self._batch = batch
        self._at_a_time = at_a_time
        self._waiting: asyncio.Queue[tuple[str, asyncio.Future[bytes]]] = asyncio.Queue(waiting)
        self._remembered: OrderedDict[bytes, bytes] = OrderedDict()
        self._room = remembered
        self._coming: dict[bytes, asyncio.Future[bytes]] = {}
        self._wanted: dict[bytes, int] = {}
        """How many callers wait."""
        self._begun: set[asyncio.Future[bytes]] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._running = [self._tasks.create_task(self._run()) for _ in range(self._at_a_time)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._running:
            task.cancel()
        for future in self._coming.values():
            if not future.done():
                future.set_exception(EmbedderError("the embedder is closed"))
        if self._tasks is not None:
            await self._tasks.__aexit__(None, None, None)
            self._tasks = None

    @abstractmethod
    async def embed_batch(self, texts: Sequence[str]) -> Sequence[bytes | EmbedderError]:
        """A vector, or what stood against it, for each text in order. Raises EmbedderError where none came."""

    async def embed(self, text: str) -> bytes:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if (vector := self._remembered.get(digest)) is not None:
            self._remembered.move_to_end(digest)
            return vector
        if self._tasks is None:
            raise EmbedderError("the embedder is not open")
        future = self._coming.get(digest)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            try:
                self._waiting.put_nowait((text, future))
            except asyncio.QueueFull:
                raise Busy("more texts wait to be embedded than can be soon: look at the gateway's CPU") from None
            self._coming[digest] = future
            future.add_done_callback(lambda done: self._came(digest, done))
        self._wanted[digest] = self._wanted.get(digest, 0) + 1
        try:
            return await asyncio.shield(future)
        finally:
            self._wanted[digest] -= 1
            if not self._wanted[digest]:
                del self._wanted[digest]
                # Nobody waits any more: what has not begun need not. What has is remembered.
                if future not in self._begun and not future.done():
                    del self._coming[digest]
                    future.cancel()

    def _came(self, digest: bytes, future: asyncio.Future[bytes]) -> None:
        self._begun.discard(future)
        if self._coming.get(digest) is future:
            del self._coming[digest]
        if not future.cancelled() and future.exception() is None:
            self._remembered[digest] = future.result()
            while len(self._remembered) > self._room:
                self._remembered.popitem(last=False)

    async def _run(self) -> None:
        while True:
            taken = [await self._waiting.get()]
            while len(taken) < self._batch and not self._waiting.empty():
                taken.append(self._waiting.get_nowait())
            taken = [(text, future) for text, future in taken if not future.done()]
            if taken:
                self._begun.update(future for _, future in taken)
                await self._answer(taken)

    async def _answer(self, taken: Sequence[tuple[str, asyncio.Future[bytes]]]) -> None:
        try:
            vectors: Sequence[bytes | EmbedderError] = await self.embed_batch([text for text, _ in taken])
        except EmbedderError as fault:
            vectors = [fault] * len(taken)
        except Exception as fault:
            vectors = [EmbedderError(f"the embedder failed: {type(fault).__name__}")] * len(taken)
        for (_, future), vector in zip(taken, vectors, strict=True):
            if future.done():
                continue
            if isinstance(vector, EmbedderError):
                future.set_exception(type(vector)(*vector.args))
            else:
                future.set_result(vector)
