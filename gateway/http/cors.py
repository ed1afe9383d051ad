"""Which pages of browsers may call the tenants' API: cross-origin resource sharing, for /v1 alone.

Reference: https://fetch.spec.whatwg.org/#http-cors-protocol. No credentials: keys come in headers, never in cookies.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Final

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPSendMessage, Message, Receive, Scope, Send

from worker.protocol.errors import ApiError

PREFLIGHT_AGE_S: Final = 600
"""How long a browser may go by a preflight's answer: so late does it hear of a change."""
_METHODS: Final = b"GET, POST, DELETE"
_HEADERS: Final = b"authorization, content-type"
_NAMES: Final = re.compile(rb"[\w!#$%&'*+.^`|~ ,-]{1,2048}")
_EXPOSED: Final = (
    *(b"x-request-id", b"request-id", b"retry-after", b"x-should-retry"),
    *(b"x-ratelimit-", b"x-penstock-", b"idempotent-replayed"),
)
"""Beginnings of names."""

Headers = list[tuple[bytes, bytes]]


class Origins:
    """``configured``: origins as browsers write them, or ``*``."""

    def __init__(self, configured: Collection[str]) -> None:
        self._allowed = frozenset(origin.encode() for origin in configured)
        self.any = "*" in configured

    def allow(self, origin: bytes) -> bool:
        return self.any or origin in self._allowed


class CrossOrigin:
    """Answers preflights, and lets allowed pages read every answer under /v1, errors and streams included."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP or not _is_tenants(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if origin is not None and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await self._preflight(send, origin, headers)
            return
        granted = self._granted(origin)

        async def send_granted(message: Message) -> None:
            if message["type"] == "http.response.start":
                own: Headers = list(message.get("headers", ()))
                exposed = b", ".join(sorted({name for name, _ in own if name.lower().startswith(_EXPOSED)}))
                more = [(b"access-control-expose-headers", exposed)] if exposed and origin is not None else []
                message = {**message, "headers": own + granted + more}
            await send(message)

        await self._app(scope, receive, send_granted)

    def _granted(self, origin: bytes | None) -> Headers:
        if self._origins.any:
            return [(b"access-control-allow-origin", b"*")]
        vary = (b"vary", b"origin")
        if origin is None or not self._origins.allow(origin):
            return [vary]
        return [(b"access-control-allow-origin", origin), vary]

    async def _preflight(self, send: Send, origin: bytes, headers: dict[bytes, bytes]) -> None:
        answer = self._granted(origin)
        if not self._origins.allow(origin):
            await _answer(send, 403, answer, not_allowed(origin).encode())
            return
        wanted = headers.get(b"access-control-request-headers", _HEADERS)
        answer += [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", wanted if _NAMES.fullmatch(wanted) else _HEADERS),
            (b"access-control-max-age", b"%d" % PREFLIGHT_AGE_S),
        ]
        await _answer(send, 204, answer)


def _is_tenants(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")


def not_allowed(origin: bytes) -> ApiError:
    """For a page that may not call."""
    named = origin[:200].decode(errors="replace")
    return ApiError(
        403,
        f"Pages of {named!r} may not call this API. The operator can allow them by the setting cors_origins.",
        type="permission_error",
        code="origin_not_allowed",
    )


async def _answer(send: Send, status: int, headers: Headers, body: bytes = b"") -> None:
    if body:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *headers]
    start: Any = {"type": "http.response.start", "status": status, "headers": headers}
    end: HTTPSendMessage = {"type": "http.response.body", "body": body, "more_body": False}
    await send(start)
    await send(end)
