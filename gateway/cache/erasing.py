"""Kept answers, erased with what else was said."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from gateway.cache.forgetting import Forgetful


class CachedAnswers:
    """Kept answers as the eraser of the prompt log has them."""

    kind: Final = "cached_answers"

    def __init__(self, cache: Forgetful) -> None:
        self._cache = cache

    async def erase(self, tenant_id: UUID, *, end_user: str | None = None, request_id: UUID | None = None) -> int:
        """Those that the request, else the end user (a keyed hash), brought in, else all. Raises RedisUnavailable."""
        origin = None if request_id is None else str(request_id)
        return await self._cache.erase(tenant_id, end_user=end_user, request_id=origin)
