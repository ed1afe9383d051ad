"""Where KV blocks can be beside the device's pool: the seam, and the host tier. Bookkeeping only; the runner copies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from worker.engine.block_pool import IntegrityError
from worker.engine.cache_events import CacheEvents
from worker.engine.plan import Tier, Transfer, TransferResult


class KVConnector(Protocol):
    """Another place for named KV blocks, as the cache sees it. A block is known by its cache group and its name.

    The cache keeps the device blocks of a transfer from being reused until ``done``; the connector does the same for
    the blocks of its own.
    """

    @property
    def removals(self) -> int:
        """How many names were forgotten so far: what was found before the last of them may be gone."""
        ...

    def attach(self, events: CacheEvents) -> None:
        """Tell there what comes and goes from now on."""
        ...

    def contains(self, group: int, name: bytes) -> bool:
        """Whether the block could be loaded now."""
        ...

    def store(
        self,
        group: int,
        names: Sequence[bytes],
        blocks: Sequence[int],
        parent: bytes | None,
        token_ids: Sequence[int] | None,
    ) -> list[int]:
        """Queue copies of device ``blocks``, each the parent of the next, whose contents are final and have ``names``;
        which of them will be copied. They can't be found here before that is done. ``parent`` and ``token_ids`` are
        for events, as in ``BlockStored``."""
        ...

    def load(self, wanted: Sequence[tuple[int, bytes, int]]) -> int:
        """Queue one transfer that fills device blocks: (group, name, device block), each of them found just now.
        The transfer's id."""
        ...

    def touch(self, group: int, names: Iterable[bytes]) -> None:
        """These were used, the last of them last. Unknown ones are ignored."""
        ...

    def transfers(self) -> list[Transfer]:
        """What was queued since the last call, to be submitted in this order."""
        ...

    def done(self, result: TransferResult) -> None:
        """A transfer of ``transfers`` has ended. What failed is forgotten."""
        ...

    def reset(self) -> None:
        """Forget every block; copies that are under way too."""
        ...

    def check(self) -> None:
        """Raise IntegrityError if a block is lost or has two uses."""
        ...


@dataclass(slots=True)
class HostTierStats:
    """Blocks since the start."""

    stored: int = 0
    loaded: int = 0
    failed: int = 0
    """Copies that failed, either way."""
    evicted: int = 0
    skipped: int = 0
    """Not stored, because every host block was being read or written."""


Key = tuple[int, bytes]
"""Cache group and name."""


class _Run(NamedTuple):
    """Blocks that were to be stored together."""

    names: Sequence[bytes]
    parent: bytes | None
    token_ids: Sequence[int] | None

    def tell(self, events: CacheEvents, group: int, position: int) -> None:
        """One of them can be found."""
        parent = self.names[position - 1] if position else self.parent
        tokens = self.token_ids
        if tokens is not None:
            size = len(tokens) // len(self.names)
            tokens = tokens[position * size : (position + 1) * size]
        events.stored(Tier.HOST, group, [self.names[position]], parent, tokens)


class _Store(NamedTuple):
    key: Key
    device_block: int
    host_block: int
    run: _Run
    position: int
    """In the run."""


class _Load(NamedTuple):
    key: Key
    device_block: int
    host_block: int


class HostTier:
    """Host memory behind the pool: every block that gets a name is copied here (write-through), so that taking a
    device block away never waits for a copy. When it is full, what was used longest ago goes.

    A host block is free, written by a transfer, or holds a named content; the latter can be read by transfers, and
    then stays until they have ended. Its ids run from 0 to ``num_blocks - 1``: there is no null block here.
    """

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError when there is no block."""
        if num_blocks < 1:
            raise ValueError(f"a host tier of {num_blocks} blocks holds nothing")
        self.num_blocks = num_blocks
        self.stats = HostTierStats()
        self.removals = 0
        self._events: CacheEvents | None = None
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: dict[Key, int] = {}
        """Which host block holds the content."""
        self._unread: OrderedDict[Key, None] = OrderedDict()
        """Those of ``_held`` that no transfer reads; the one used longest ago is first."""
        self._keys: dict[int, Key] = {}
        """The reverse of ``_held``."""
        self._readers: dict[int, int] = {}
        """How many transfers read a host block."""
        self._writing: dict[Key, int] = {}
        """Host blocks that will hold the content once their transfer is done."""
        self._queued_stores: list[_Store] = []
        self._queued_loads: list[tuple[int, list[_Load]]] = []
        self._stores: dict[int, list[_Store]] = {}
        """By transfer, what was submitted and is not done."""
        self._loads: dict[int, list[_Load]] = {}
        self._next_id = 0

    @property
    def num_held(self) -> int:
        """Blocks that can be found."""
        return len(self._held)

    def attach(self, events: CacheEvents) -> None:
        self._events = events

    def contains(self, group: int, name: bytes) -> bool:
        return (group, name) in self._held

    def store(
        self,
        group: int,
        names: Sequence[bytes],
        blocks: Sequence[int],
        parent: bytes | None,
        token_ids: Sequence[int] | None,
    ) -> list[int]:
        run = _Run(names, parent, token_ids)
        copied = []
        for position, (name, block) in enumerate(zip(names, blocks, strict=True)):
            key = (group, name)
            if key in self._held or key in self._writing:
                continue
            host_block = self._take_block()
            if host_block is None:
                self.stats.skipped += 1
                continue
            self._writing[key] = host_block
            self._queued_stores.append(_Store(key, block, host_block, run, position))
            copied.append(block)
        return copied

    def load(self, wanted: Sequence[tuple[int, bytes, int]]) -> int:
        loads = []
        for group, name, block in wanted:
            key = (group, name)
            host_block = self._held[key]
            self._unread.pop(key, None)
            self._readers[host_block] = self._readers.get(host_block, 0) + 1
            loads.append(_Load(key, block, host_block))
        transfer_id = self._take_id()
        self._queued_loads.append((transfer_id, loads))
        return transfer_id

    def touch(self, group: int, names: Iterable[bytes]) -> None:
        unread = self._unread
        for name in names:
            key = (group, name)
            if key in unread:
                unread.move_to_end(key)

    def transfers(self) -> list[Transfer]:
        submitted = []
        for transfer_id, loads in self._queued_loads:
            self._loads[transfer_id] = loads
            pairs = [(load.host_block, load.device_block) for load in loads]
            submitted.append(Transfer(transfer_id, Tier.HOST, Tier.DEVICE, pairs))
        self._queued_loads = []
        if self._queued_stores:
            transfer_id = self._take_id()
            self._stores[transfer_id] = self._queued_stores
            pairs = [(store.device_block, store.host_block) for store in self._queued_stores]
            submitted.append(Transfer(transfer_id, Tier.DEVICE, Tier.HOST, pairs))
            self._queued_stores = []
        return submitted

    def done(self, result: TransferResult) -> None:
        failed = set(result.failed)
        self.stats.failed += len(failed)
        if (stores := self._stores.pop(result.id, None)) is not None:
            self._end_stores(stores, failed)
        else:
            self._end_loads(self._loads.pop(result.id), failed)

    def reset(self) -> None:
        self._writing.clear()
        for key in list(self._held):
            self._drop(key)

    def _end_stores(self, stores: list[_Store], failed: set[int]) -> None:
        good = []
        for store in stores:
            wanted = self._writing.get(store.key) == store.host_block
            if wanted:
                del self._writing[store.key]
            if wanted and store.host_block not in failed:
                good.append(store)
            else:
                self._free.append(store.host_block)
        self.stats.stored += len(good)
        for store in good:
            self._held[store.key] = store.host_block
            self._keys[store.host_block] = store.key
            if self._events is not None:
                store.run.tell(self._events, store.key[0], store.position)
        # A prompt's end should go before its beginning.
        for store in reversed(good):
            self._unread[store.key] = None

    def _end_loads(self, loads: list[_Load], failed: set[int]) -> None:
        self.stats.loaded += sum(load.device_block not in failed for load in loads)
        for load in reversed(loads):
            readers = self._readers.pop(load.host_block) - 1
            if readers:
                self._readers[load.host_block] = readers
            key = self._keys.get(load.host_block)
            if key is not None and load.device_block in failed:
                self._drop(key)
            elif readers:
                continue
            elif key is None:
                self._free.append(load.host_block)
            else:
                self._unread[key] = None

    def _take_block(self) -> int | None:
        """A block to write to: a free one, else that of the content used longest ago; None if all are in use."""
        if self._free:
            return self._free.pop()
        if not self._unread:
            return None
        oldest, _ = self._unread.popitem(last=False)
        self.stats.evicted += 1
        return self._forget(oldest)

    def _drop(self, key: Key) -> None:
        """Forget a content. Its block is free at once, or when the last transfer that reads it has ended."""
        self._unread.pop(key, None)
        host_block = self._forget(key)
        if host_block not in self._readers:
            self._free.append(host_block)

    def _forget(self, key: Key) -> int:
        host_block = self._held.pop(key)
        del self._keys[host_block]
        self.removals += 1
        if self._events is not None:
            self._events.removed(Tier.HOST, *key)
        return host_block

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def check(self) -> None:
        written = [store.host_block for store in self._queued_stores]
        written += [store.host_block for stores in self._stores.values() for store in stores]
        reads = [load for _, loads in self._queued_loads for load in loads]
        reads += [load for loads in self._loads.values() for load in loads]
        readers: dict[int, int] = {}
        for load in reads:
            readers[load.host_block] = readers.get(load.host_block, 0) + 1
        if readers != self._readers:
            raise IntegrityError("the readers of the host tier's blocks are miscounted")
        forgotten = [block for block in readers if block not in self._keys]
        used = sorted([*self._free, *self._held.values(), *written, *forgotten])
        if used != list(range(self.num_blocks)):
            raise IntegrityError("a block of the host tier is lost or has two uses")
        if {block: key for key, block in self._held.items()} != self._keys:
            raise IntegrityError("a name of the host tier leads to the wrong block")
        if {key for key, block in self._held.items() if block not in readers} != self._unread.keys():
            raise IntegrityError("what may be taken from the host tier is not what nobody reads")
        if not set(self._writing.values()) <= set(written):
            raise IntegrityError("a copy to the host tier is waited for that nobody makes")
