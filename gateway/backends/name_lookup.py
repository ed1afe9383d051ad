"""Addresses of backends' names.

One look-up of a name at a time, however many connections wait for it: each takes one of the few threads that there are
for it, and a name server that does not answer must not take them all.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Final

KNOWN_FOR_S: Final = 10.0
_MOST_KNOWN: Final = 1000

Address = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]
"""As ``socket.getaddrinfo`` gives it."""


class NameLookup:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: dict[tuple[str, int], tuple[float, list[Address]]] = {}
        """With the loop time until which they are believed."""
        self._asking: dict[tuple[str, int], asyncio.Task[list[Address]]] = {}

    async def addresses(self, host: str, port: int) -> list[Address]:
        """At least one; of several each comes first in turn. Raises OSError, and UnicodeError for what is no name."""
        if (literal := _literal(host, port)) is not None:
            return [literal]
        key = (host, port)
        until, found = self._known.get(key, (0.0, []))
        if until <= self._loop.time():
            asking = self._asking.get(key)
            if asking is None:
                lookup = self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                asking = self._asking[key] = self._loop.create_task(lookup)  # type: ignore[arg-type]
                asking.add_done_callback(partial(self._answered, key))
            # Who is cancelled here does not cancel it for the others.
            await asyncio.wait((asking,))
            if asking.cancelled():
                raise ConnectionAbortedError("closed while a name was looked up")
            found = asking.result()
        if not found:
            raise OSError("a name without an address")
        first = found.pop(0)
        found.append(first)
        return [first, *found[:-1]]

    def close(self) -> None:
        for asking in self._asking.values():
            asking.cancel()

    def _answered(self, key: tuple[str, int], asked: asyncio.Task[list[Address]]) -> None:
        del self._asking[key]
        if asked.cancelled() or asked.exception() is not None:
            self._known.pop(key, None)
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[key] = (self._loop.time() + KNOWN_FOR_S, asked.result())


def _literal(host: str, port: int) -> Address | None:
    try:
        if ":" not in host:
            socket.inet_pton(socket.AF_INET, host)
            return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port)
        socket.inet_pton(socket.AF_INET6, host)
        return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port, 0, 0)
    except (OSError, UnicodeError):
        return None  # a name, or an address that names its link
