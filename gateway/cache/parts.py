"""What the answer cache needs of others, as it sees them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Protocol
from uuid import UUID


class DataKey(Protocol):
    """Seals what one tenant, or one of its end users, has in Redis."""

    @property
    def id(self) -> UUID: ...

    def seal(self, data: bytes, context: bytes) -> bytes:
        """With the key's id in front."""
        ...

    def unseal(self, sealed: bytes, context: bytes) -> bytes:
        """Raises SealBroken."""
        ...

    def encrypt(self, nonce: bytes, data: bytes, context: bytes) -> bytes: ...


class DataKeys(Protocol):
    """Both raise DatabaseUnavailable, and UnknownMasterKey for keys that nobody here can open."""

    async def key(self, tenant_id: UUID, end_user_hash: str | None) -> DataKey:
        """Made if there is none."""
        ...

    async def by_id(self, tenant_id: UUID, key_id: UUID) -> DataKey | None:
        """None: it was erased."""
        ...


class Rejected(Protocol):
    @property
    def guard(self) -> str: ...


class Guards(Protocol):
    """What texts say beyond their likeness; the package ``gateway.cache.guards`` is one."""

    def check(self, asked: str, kept: str) -> Rejected | None:
        """Why an answer to ``kept`` is none to ``asked``; None: nothing speaks against it."""
        ...

    def speaks_of_now(self, text: str) -> bool: ...

    def readable(self, text: str) -> bool:
        """Whether it is in a script and a language that the guards know."""
        ...


class Embedder(Protocol):
    @property
    def name(self) -> str:
        """Of the model: vectors of different names are never compared."""
        ...

    @property
    def dimensions(self) -> int: ...

    async def embed(self, text: str) -> array[float] | bytes:
        """As many float32 as it has dimensions; of any length but zero. Raises EmbedderError, TooLong among it."""
        ...


class Facts(Protocol):
    """What an answer says of itself; see ``gateway.assembly``."""

    @property
    def complete(self) -> bool: ...

    @property
    def has_tool_calls(self) -> bool: ...

    @property
    def refused(self) -> bool: ...

    @property
    def truncated(self) -> bool: ...

    @property
    def text(self) -> str: ...


class Counter(Protocol):
    """Where the cache counts what it does: ``lookups`` by outcome and tier, ``rejected`` by guard, ``kept`` by outcome,
    ``agreement`` by verdict, ``evicted`` and ``faults`` by part."""

    def count(self, name: str, labels: Mapping[str, str], amount: int = 1) -> None: ...
