"""One answer that is kept, and how it lies in Redis: packed, compressed if that pays, and sealed by a data key.

Sealed values are bound to their tenant and their exact name, so that none can be put in another's place; and what they
were found by is checked once more when they are open.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import msgspec

from gateway.billing.usage import TokenUsage
from gateway.cache.parts import DataKey, DataKeys
from gateway.cache.question import Question
from gateway.secret_key import SealBroken

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_PLAIN, _COMPRESSED = b"0", b"1"
_WORTH_COMPRESSING: Final = 2048
"""Bytes. Below, it would save little, and undoing it takes as long as all the rest of a look-up."""
_LEVEL: Final = 3
_ID_BYTES: Final = 16


class Entry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Its fields are written in this order: add at the end, with defaults."""

    exact: str
    partition: str | None
    """Within which it may be found by its meaning."""
    tenant_id: UUID
    project_id: UUID
    end_user: str | None
    """Of the request that made it."""
    route: str
    version: str
    made_at: datetime
    ttl_s: int
    request_id: str
    """That made it."""
    tool_calls: bool
    usage: TokenUsage
    body: bytes
    """The whole answer, JSON."""
    text: str
    """The last user turn's, for the guards; empty if nothing is found by it."""
    of_now: bool = False
    """Whether the prompt speaks of the present."""

    def good_for(self, question: Question, now: datetime) -> bool:
        """Whether it may be given to one who found it. The names say so already; this is a second wall."""
        rules = question.rules
        return (
            self.tenant_id == question.tenant_id
            and (rules.across_projects or self.project_id == question.project_id)
            and (rules.across_end_users or self.end_user == question.end_user)
            and self.route == question.route
            and self.version == question.version
            and (rules.tool_calls or not self.tool_calls)
            and (rules.time_words or not self.of_now)
            and (now - self.made_at).total_seconds() < min(self.ttl_s, rules.ttl_s)
        )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def seal_entry(entry: Entry, key: DataKey) -> bytes:
    return _seal(_encoder.encode(entry), key, _context(b"entry", entry.tenant_id, entry.exact))


def seal_text(text: str, tenant_id: UUID, exact: str, key: DataKey) -> bytes:
    """The last user turn's text by itself, so that it can be compared without the answer."""
    return _seal(text.encode(), key, _context(b"text", tenant_id, exact))


class Unreadable(Exception):
    """What lies in Redis cannot be opened, and never will: its key was erased, or it was changed."""


class Opener:
    """Opens what was sealed for one tenant. Raises Unreadable, and DatabaseUnavailable while its key cannot be read."""

    def __init__(self, keys: DataKeys) -> None:
        self._keys = keys

    async def entry(self, sealed: bytes, tenant_id: UUID, exact: str) -> Entry:
        plain = await self._open(sealed, tenant_id, _context(b"entry", tenant_id, exact))
        try:
            entry = _decoder.decode(plain)
        except msgspec.MsgspecError as fault:
            raise Unreadable("it was written by another version") from fault
        if entry.tenant_id != tenant_id or entry.exact != exact:
            raise Unreadable("it was made for another question")
        return entry

    async def text(self, sealed: bytes, tenant_id: UUID, exact: str) -> str:
        return (await self._open(sealed, tenant_id, _context(b"text", tenant_id, exact))).decode()

    async def _open(self, sealed: bytes, tenant_id: UUID, context: bytes) -> bytes:
        if len(sealed) <= _ID_BYTES:
            raise Unreadable("it is too short")
        key = await self._keys.by_id(tenant_id, UUID(bytes=sealed[:_ID_BYTES]))
        if key is None:
            raise Unreadable("its key was erased")
        try:
            plain = key.unseal(sealed, context)
        except SealBroken as fault:
            raise Unreadable(str(fault)) from fault
        return zstd.decompress(plain[1:]) if plain[:1] == _COMPRESSED else plain[1:]


def utc(moment: datetime) -> datetime:
    """To the millisecond, as entries have it."""
    return moment.astimezone(UTC).replace(microsecond=moment.microsecond // 1000 * 1000)


def _seal(plain: bytes, key: DataKey, context: bytes) -> bytes:
    if len(plain) >= _WORTH_COMPRESSING:
        return key.seal(_COMPRESSED + zstd.compress(plain, _LEVEL), context)
    return key.seal(_PLAIN + plain, context)


def _context(kind: bytes, tenant_id: UUID, exact: str) -> bytes:
    return b"answer cache " + kind + b" " + tenant_id.bytes + exact.encode()
