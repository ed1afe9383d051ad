"""Rows of a log read in batches, their metadata opened."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple
from uuid import UUID

import structlog

from gateway.datakeys.data_key import DataKey, key_id_of
from gateway.datakeys.service import DataKeys
from gateway.promptlog.entry import Feedback, Kept, Summary
from gateway.promptlog.filters import Span
from gateway.promptlog.sealing import Unreadable, unpack_body, unpack_feedback, unpack_metadata
from gateway.promptlog.store import Bodies, Row, Store

_log = structlog.get_logger(__name__)


class Opened(NamedTuple):
    """``facts`` and ``key`` are None where the key is erased, or the entry does not open."""

    row: Row
    facts: Kept | None
    key: DataKey | None


class Opener:
    """Raises RedisUnavailable, DatabaseUnavailable and UnknownMasterKey from each method."""

    def __init__(self, store: Store, data_keys: DataKeys) -> None:
        self._store = store
        self._data_keys = data_keys

    async def batches(self, tenant_id: UUID, span: Span, count: int) -> AsyncGenerator[list[Opened], None]:
        """All rows of ``span``, ``count`` at a time; ``span`` is shortened by what was handed out."""
        while True:
            rows = await self._store.rows(
                tenant_id, oldest=span.oldest, newest=span.newest, count=count, newest_first=span.newest_first
            )
            if rows:
                span.go_on(rows[-1].place)
                yield await self.open(tenant_id, rows)
            if len(rows) < count:
                return

    async def open(self, tenant_id: UUID, rows: Sequence[Row]) -> list[Opened]:
        ids = {row: key_id_of(row.metadata) for row in rows}
        keys = await self._data_keys.by_ids(tenant_id, {key_id for key_id in ids.values() if key_id is not None})
        opened = []
        for row, key_id in ids.items():
            facts = None
            key = keys[key_id] if key_id is not None else None
            if key is not None:
                try:
                    facts = unpack_metadata(row.metadata, key, tenant_id, row.request_id)
                except Unreadable as fault:
                    self._tell(row.request_id, fault)
            opened.append(Opened(row, facts, key if facts is not None else None))
        return opened

    async def summaries(self, tenant_id: UUID, chosen: Sequence[Opened]) -> list[Summary]:
        """With their feedback. Those that do not open are left out."""
        readable = [(each.row.request_id, each.facts, each.key) for each in chosen]
        feedback = await self._store.feedback(tenant_id, [request_id for request_id, _, _ in readable])
        return [
            Summary(facts=facts, feedback=self.feedback(sealed, key, tenant_id, request_id))
            for (request_id, facts, key), sealed in zip(readable, feedback, strict=True)
            if facts is not None and key is not None
        ]

    def feedback(self, sealed: bytes | None, key: DataKey, tenant_id: UUID, request_id: UUID) -> Feedback | None:
        try:
            return None if sealed is None else unpack_feedback(sealed, key, tenant_id, request_id)
        except Unreadable as fault:
            self._tell(request_id, fault)
            return None

    def bodies(self, sealed: Bodies, key: DataKey, tenant_id: UUID, request_id: UUID) -> Bodies:
        """As they were logged. Long work, without I/O."""
        try:
            return Bodies(
                *(
                    None if body is None else unpack_body(body, key, tenant_id, request_id, part)
                    for part, body in zip(Bodies._fields, sealed, strict=True)
                )
            )
        except Unreadable as fault:
            self._tell(request_id, fault)
            return Bodies(None, None)

    def _tell(self, request_id: UUID, fault: Unreadable) -> None:
        _log.warning("logged_prompt_unreadable", request_id=str(request_id), error=str(fault))
