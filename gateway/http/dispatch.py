"""Requests for inference go straight to their doors.

What Litestar does on the way to a handler (routing, a request object, parameters, a response) takes a tenth of such a
request's time, and the doors use none of it. Whatever is odd, or comes while the gateway stops, is Litestar's, whose
handlers of the same paths also tell the API reference of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.http.draining import Drain

_PLAIN_HOST: Final = re.compile(rb"[\w.:\[\]-]{1,255}")


class Dispatch:
    """``doors``: by path, what makes the application that answers one POST. All else goes to ``app``."""

    def __init__(self, app: ASGIApp, doors: Mapping[str, Callable[[], ASGIApp]], drain: Drain) -> None:
        self._app = app
        self._doors = doors
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == ScopeType.HTTP and scope["method"] == "POST" and not self._drain.began:
            door = self._doors.get(scope["path"])
            if door is not None and _is_plain(scope):
                with self._drain.running():
                    await door()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_plain(scope: Scope) -> bool:
    """Whether all hosts that the head names can be hosts."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    return all(map(_PLAIN_HOST.fullmatch, hosts))
