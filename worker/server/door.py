"""Who may come in, how far they are trusted, and who is still inside."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final
from uuid import uuid4

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from worker.protocol import headers
from worker.protocol.errors import bad_request, unauthorized
from worker.server.call import Call

_LONGEST_ID: Final = 128
_LONGEST_TENANT: Final = 256
_PRIORITY_BITS: Final = 32
_MOST_WEIGHT: Final = 1e6


class Door:
    """Who may come in, and whether anyone still may."""

    def __init__(self, fleet_token: str | None, *, token_required: bool) -> None:
        """``token_required``: whether ``/v1`` is closed to those without the token; else it only earns trust."""
        self._token = fleet_token.encode() if fleet_token else None
        self._token_required = token_required
        self.draining = False
        """Set when the worker is about to leave: running answers go on, new ones are refused."""
        self._answering = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Around each answer, so that ``wait_idle`` waits for it."""
        self._answering += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._answering -= 1
            if not self._answering:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return once no answer is under way."""
        await self._idle.wait()

    def trusts(self, request_headers: Mapping[str, str]) -> bool:
        """Whether a request bears the fleet token."""
        scheme, _, given = request_headers.get("authorization", "").partition(" ")
        if self._token is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given.strip().encode(), self._token)

    def guard(self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        """Litestar's guard of ``/v1``. Raises ApiError (401)."""
        if self._token_required and not self.trusts(connection.headers):
            raise unauthorized("This worker answers only with its fleet token as the API key.")

    def guard_fleet(self, connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        """Litestar's guard of what the fleet alone may do: it needs the token wherever there is one.

        Raises ApiError (401).
        """
        if self._token is not None and not self.trusts(connection.headers):
            raise unauthorized("This path of a worker needs its fleet token as a bearer token.")

    def call(self, request_headers: Mapping[str, str]) -> Call:
        """What the headers say. Those of the gateway count only with the fleet token. Raises ApiError (400)."""
        if not self.trusts(request_headers):
            return Call(uuid4().hex)
        priority: int | None = None
        with contextlib.suppress(ValueError):
            priority = int(request_headers.get(headers.PRIORITY, "0"))
        if priority is None or not -(1 << _PRIORITY_BITS - 1) <= priority < 1 << _PRIORITY_BITS - 1:
            raise bad_request(
                f"The header {headers.PRIORITY!r} must be a whole number that fits into {_PRIORITY_BITS} bits."
            )
        weight = math.nan
        with contextlib.suppress(ValueError):
            weight = float(request_headers.get(headers.WEIGHT, "1"))
        if not 1 / _MOST_WEIGHT <= weight <= _MOST_WEIGHT:
            raise bad_request(
                f"The header {headers.WEIGHT!r} must be a number from {1 / _MOST_WEIGHT:g} to {_MOST_WEIGHT:g}."
            )
        tenant = request_headers.get(headers.TENANT, "")
        if len(tenant) > _LONGEST_TENANT:
            raise bad_request(f"The header {headers.TENANT!r} is over {_LONGEST_TENANT} characters.")
        return Call(
            request_id=request_headers.get(headers.REQUEST_ID, "")[:_LONGEST_ID] or uuid4().hex,
            salt=request_headers.get(headers.TENANT_SALT, ""),
            tenant=tenant,
            weight=weight,
            priority=priority,
            clamp_output=request_headers.get(headers.CLAMP_OUTPUT) == "1",
            metered=request_headers.get(headers.METER) == "1",
        )
