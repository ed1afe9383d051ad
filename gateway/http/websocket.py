"""WebSocket ``/v1/realtime-chat``: who may open one, and how it is opened or refused (RFC 6455, ASGI's WebSocket)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit

import structlog
from litestar import asgi
from litestar.enums import ScopeType
from litestar.handlers import ASGIRouteHandler
from litestar.types import Receive, Scope, Send, WebSocketScope

from gateway.http.client import Client
from gateway.http.cors import Origins, not_allowed
from gateway.http.websocket_session import Session
from gateway.ids import uuid7
from gateway.pipeline import Pipeline
from worker.protocol.errors import ApiError, server_error

PATH: Final = "/v1/realtime-chat"
STOP: Final = "penstock.stop"
"""ASGI extension: ``asked`` is an event by which the server says that it stops."""
HEADS: Final = ("x-penstock-heads", "penstock-heads")
"""Header, or sub-protocol, of who wants to be told what would stand in the head of each answer."""
_KEY_IN: Final = {"penstock": "penstock-api-key.", "realtime": "openai-insecure-api-key."}
"""By sub-protocol, how one begins that holds the key: pages of browsers can set no headers."""

_log = structlog.get_logger("gateway.request")


def websocket_handler(pipeline: Pipeline, origins: Origins, *, idle_s: float) -> ASGIRouteHandler:
    @asgi(PATH, copy_scope=True)
    async def realtime_chat(scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, receive, send)
        if scope["type"] == ScopeType.HTTP:
            error = ApiError(426, f"{PATH} is a WebSocket. Open it as one.", code="upgrade_required")
            headers = [("x-request-id", str(uuid7())), ("upgrade", "websocket"), ("connection", "upgrade")]
            await client.answer(error.status, error.encode(), headers, media_type="application/json")
            return
        with contextlib.suppress(OSError):  # the client is gone
            if (await receive())["type"] == "websocket.connect":
                await _converse(client, scope, receive, send)

    async def _converse(client: Client, scope: WebSocketScope, receive: Receive, send: Send) -> None:
        offered = scope["subprotocols"]
        key = client.key() or _key_of(offered)
        try:
            _check_origin(client, origins)
            await pipeline.authenticate(key)
        except ApiError as error:
            await _refuse(scope, send, error)
            return
        except Exception:
            _log.exception("request_crashed", path=PATH)
            await _refuse(scope, send, server_error("The gateway failed. Its log has the cause."))
            return
        chosen = next((name for name in _KEY_IN if name in offered), None)
        accept: Any = {"type": "websocket.accept", "subprotocol": chosen, "headers": []}
        await send(accept)
        await Session(
            pipeline,
            client,
            key,
            receive,
            send,
            path=PATH,
            idle_s=idle_s,
            heads=client.text(HEADS[0]) is not None or HEADS[1] in offered,
            stop=_extensions(scope).get(STOP, {}).get("asked"),
        ).run()

    return realtime_chat


def _key_of(offered: Sequence[str]) -> str | None:
    for name, beginning in _KEY_IN.items():
        found = [each.removeprefix(beginning) for each in offered if each.startswith(beginning)]
        if found and name in offered:
            return found[0]
    return None


def _check_origin(client: Client, origins: Origins) -> None:
    """Browsers tell the page's origin and let any page connect: it is for the server to refuse. Raises ApiError."""
    origin = client.header(b"origin")
    if origin is None or origins.allow(origin.encode("latin-1")):
        return
    try:
        of_this_host = urlsplit(origin).netloc == client.header(b"host")
    except ValueError:
        of_this_host = False
    if not of_this_host:
        raise not_allowed(origin.encode("latin-1"))


def _extensions(scope: Scope) -> dict[str, dict[str, Any]]:
    return cast(dict[str, dict[str, Any]], scope.get("extensions") or {})


async def _refuse(scope: Scope, send: Send, error: ApiError) -> None:
    """By an HTTP answer where the server can give one, else by closing."""
    message: Any
    if "websocket.http.response" not in _extensions(scope):
        message = {"type": "websocket.close", "code": 1008, "reason": error.body.message[:120]}
        await send(message)
        return
    body = error.encode()
    told = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": str(uuid7())}
    headers = [(name.encode(), value.encode("latin-1")) for name, value in (told | error.headers).items()]
    message = {"type": "websocket.http.response.start", "status": error.status, "headers": headers}
    await send(message)
    message = {"type": "websocket.http.response.body", "body": body, "more_body": False}
    await send(message)
