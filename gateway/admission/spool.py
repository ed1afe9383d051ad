"""Settlements that Redis could not take, kept on disk until it has them.

Nothing is written while Redis is well. Each process appends to a file of its own, in a thread, and syncs it: from then
on a settlement survives this process. Files of processes that ended are replayed by any process that shares the folder.

Replaying is safe at any time. While the request's tombstone is in Redis, a settlement that landed before changes
nothing, and one that the janitor anticipated replaces it. When the tombstone is gone (it outlives the longest request
threefold, and is lost with Redis' data), the event goes to the ledger again, where the request id makes it one row;
the running budget period is then counted anew from the ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from uuid import UUID

from gateway.admission.redis_wire import RedisError, RedisUnavailable
from gateway.admission.spool_file import Reading, Record, SpoolFile, UnknownFormat, encode_line, orphans

log = logging.getLogger(__name__)

BATCH = 100
COMPACT_BYTES = 64 * 1024 * 1024


class Spool:
    """One per process. A disk that is full or cannot be written is logged; settlements then wait in memory alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: SpoolFile | None = None
        self._lines: dict[UUID, bytes] = {}
        """Of all settlements that did not land."""
        self._safe: set[UUID] = set()
        self._queue: dict[UUID, asyncio.Future[None]] = {}
        self._dirty = False
        self._compact_at = COMPACT_BYTES
        self._failing = False
        self._closed = False
        self._refused: set[Path] = set()
        self._work: asyncio.Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")

    @property
    def safe(self) -> int:
        """How many settlements that did not land are on disk."""
        return len(self._safe)

    def keep(self, record: Record) -> asyncio.Future[None]:
        """Write a settlement, unless it is there. The future is done when it is safe, or the disk would not take it;
        in that case ask again."""
        loop = asyncio.get_running_loop()
        if record.request_id in self._safe or self._closed:
            done: asyncio.Future[None] = loop.create_future()
            done.set_result(None)
            return done
        if (queued := self._queue.get(record.request_id)) is not None:
            return queued
        self._lines[record.request_id] = encode_line(record)
        future = self._queue[record.request_id] = loop.create_future()
        self._begin()
        return future

    def landed(self, request_id: UUID) -> None:
        """Redis has it."""
        if self._lines.pop(request_id, None) is None:
            return
        self._safe.discard(request_id)
        if (queued := self._queue.pop(request_id, None)) is not None and not queued.done():
            queued.set_result(None)
        self._begin()

    async def replay(self, settle: Callable[[Record], Awaitable[object]]) -> int:
        """Settle what processes that ended left in the folder; returns how many settlements that were.

        A file is deleted when all of it has landed. ``settle`` may raise RedisUnavailable or RedisError: the file
        then stays for another time. Raises OSError.
        """
        replayed = 0
        for path in await asyncio.to_thread(orphans, self._folder):
            if path in self._refused:
                continue
            file = await asyncio.to_thread(SpoolFile.adopt, path)
            if file is not None:
                replayed += await self._replay_file(file, settle)
        return replayed

    async def close(self) -> None:
        """Finish what is being written. What did not land stays on disk for the next process."""
        self._closed = True
        while self._work is not None:
            await asyncio.wait([self._work])
        self._thread.shutdown(wait=False)
        if self._file is not None:
            if self._safe:
                self._file.close()
            else:
                self._file.remove()
            self._file = None

    async def _replay_file(self, file: SpoolFile, settle: Callable[[Record], Awaitable[object]]) -> int:
        reading, replayed, whole = Reading(), 0, True
        batches = file.batches(BATCH, reading)
        try:
            while batch := await asyncio.to_thread(_next, batches):
                outcomes = await asyncio.gather(*map(settle, batch), return_exceptions=True)
                for record, outcome in zip(batch, outcomes, strict=True):
                    if not isinstance(outcome, BaseException):
                        replayed += 1
                        continue
                    whole = False
                    if isinstance(outcome, RedisError):
                        log.error("Redis refuses the spooled settlement of %s: %s", record.request_id, outcome)
                    elif not isinstance(outcome, RedisUnavailable):
                        raise outcome
        except UnknownFormat:
            self._refused.add(file.path)
            log.error("%s was written by another release; run that one until the file is gone", file.path)
            whole = False
        except BaseException:
            batches.close()
            file.close()
            raise
        if not whole:
            file.close()
        elif reading.damaged:
            aside = await asyncio.to_thread(file.set_aside)
            log.error("%d lines of a spool file are damaged, the other %d have landed; it is kept as %s",
                      reading.damaged, replayed, aside)  # fmt: skip
        else:
            await asyncio.to_thread(file.remove)
        if replayed:
            log.warning("%d settlements of a process that ended were replayed", replayed)
        return replayed

    # One piece of work at a time, in the thread

    def _begin(self) -> None:
        if self._work is not None:
            return
        work: Callable[[], None]
        if self._queue:
            batch, self._queue = self._queue, {}
            work = partial(self._write, b"".join(self._lines[request_id] for request_id in batch))
        elif self._dirty and not self._lines:
            batch, work = {}, self._clear
        else:
            return
        self._work = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(self._thread, work))
        self._work.add_done_callback(partial(self._ended, batch))

    def _ended(self, batch: dict[UUID, asyncio.Future[None]], work: asyncio.Future[None]) -> None:
        self._work = None
        fault = None if work.cancelled() else work.exception()
        if fault is not None:
            if not self._failing:
                log.error(
                    "the spool in %s cannot be written, settlements wait in memory alone: %s", self._folder, fault
                )
        elif batch:
            self._dirty = True
            self._safe |= batch.keys() & self._lines.keys()
        else:
            self._dirty = False
        if fault is None and self._failing:
            log.warning("the spool in %s can be written again", self._folder)
        self._failing = fault is not None
        for future in batch.values():
            if not future.done():
                future.set_result(None)
        if fault is None or self._queue:
            self._begin()

    def _write(self, lines: bytes) -> None:
        file = self._file
        if file is not None and not file.linked:
            log.error("%s was deleted while it was in use; it is written anew", file.path)
            file = self._renew(file, self._needed())
        elif file is not None and file.size + len(lines) > self._compact_at:
            needed = self._needed()
            self._compact_at = max(COMPACT_BYTES, 2 * len(needed))
            if len(needed) < file.size // 2:
                file = self._renew(file, needed)
        if file is None:
            file = self._file = SpoolFile.create(self._folder)
        file.append(lines)

    def _needed(self) -> bytes:
        # In the thread: the loop may take some away meanwhile.
        return b"".join(line for request_id in list(self._safe) if (line := self._lines.get(request_id)) is not None)

    def _renew(self, old: SpoolFile, needed: bytes) -> SpoolFile:
        """Go on in a new file that begins with what is needed of the old one."""
        file = SpoolFile.create(self._folder)
        try:
            file.append(needed)
        except OSError:
            file.remove()
            raise
        self._file = file
        old.remove()
        return file

    def _clear(self) -> None:
        if self._file is not None:
            self._file.remove()
            self._file = None


def _next(batches: Generator[list[Record], None, None]) -> list[Record] | None:
    return next(batches, None)
