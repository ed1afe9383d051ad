"""``/healthz``: this process runs. ``/readyz``: it can serve, with a word on each thing it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from litestar import Response, get, head
from litestar.handlers import HTTPRouteHandler

CHECK_TIMEOUT_S = 2.0
GOOD_FOR_S = 1.0
"""How long an outcome is told again: nobody needs a key to ask, so asking must cost next to nothing."""

Check = Callable[[], Awaitable[None]]
"""Returns if all is well, raises if not."""


def health_handlers(
    checks: Mapping[str, Check],
    backends: Callable[[], int],
    *,
    needs_backend: bool,
    draining: Callable[[], bool] = lambda: False,
    notes: Callable[[], Awaitable[Mapping[str, str]]] | None = None,
) -> list[HTTPRouteHandler]:
    """``backends``: how many workers and declared backends take requests. ``draining``: whether none are taken here.
    ``notes``: what is told beside, and keeps no gateway from being ready."""
    readings = _Readings(checks, notes)

    @get("/healthz", operation_id="health", summary="Whether the process runs", tags=["Operations"], security=[{}])
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @get(
        "/readyz",
        operation_id="readiness",
        summary="Whether requests can be served",
        tags=["Operations"],
        security=[{}],
    )
    async def readyz() -> Response[bytes]:
        passed = await readings.passed()
        alive = backends()
        ready = all(passed.values()) and (alive > 0 or not needs_backend) and not draining()
        state: dict[str, Any] = {"status": "ready" if ready else "draining" if draining() else "unready"}
        state |= {name: "ok" if well else "unavailable" for name, well in passed.items()}
        state["backends"] = alive
        state |= readings.notes
        return Response(msgspec.json.encode(state), status_code=200 if ready else 503, media_type="application/json")

    @head("/healthz", include_in_schema=False)
    async def healthz_head() -> None:
        return None

    @head("/readyz", include_in_schema=False)
    async def readyz_head() -> Response[None]:
        told: Response[bytes] = await readyz.fn()
        return Response(None, status_code=told.status_code)

    return [healthz, readyz, healthz_head, readyz_head]


class _Readings:
    """The checks' latest outcome, shared by all who ask."""

    def __init__(self, checks: Mapping[str, Check], notes: Callable[[], Awaitable[Mapping[str, str]]] | None) -> None:
        self._checks = checks
        self._notes = notes
        self.notes: Mapping[str, str] = {}
        self._passed: dict[str, bool] = {}
        self._good_until = float("-inf")
        self._checking = asyncio.Lock()

    async def passed(self) -> Mapping[str, bool]:
        loop = asyncio.get_running_loop()
        async with self._checking:
            if loop.time() >= self._good_until:
                outcomes = await asyncio.gather(*map(_passes, self._checks.values()))
                self._passed = dict(zip(self._checks, outcomes, strict=True))
                if self._notes is not None:
                    self.notes = await self._notes()
                self._good_until = loop.time() + GOOD_FOR_S
            return self._passed


async def _passes(check: Check) -> bool:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await check()
    except Exception:  # whatever it is, the service cannot be used now, and that is the whole answer
        return False
    return True
