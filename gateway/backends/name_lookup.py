"""Addresses of backends' names.

One look-up of a name at a time, however many connections wait for it: each takes one of the few threads that there are
for it, and a name server that does not answer must not take them all. Nor does it take away the backends whose
addresses were known a while ago (RFC 8767).
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Final, NamedTuple

KNOWN_FOR_S: Final = 10.0
STILL_USED_S: Final = 600.0
"""After it was told, an address may be used if the name server does not answer, or knows nothing for the moment."""
PATIENCE_S: Final = 0.5
"""For a name server's answer, if there is such an address."""
_MOST_KNOWN: Final = 1000

Address = tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]
"""As ``socket.getaddrinfo`` gives it."""


class _Known(NamedTuple):
    addresses: list[Address]
    """The one that is next to come first is the first."""
    fresh_until: float
    """Loop time, as the other."""
    used_until: float


class NameLookup:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._known: dict[tuple[str, int], _Known] = {}
        self._asking: dict[tuple[str, int], asyncio.Task[list[Address]]] = {}

    async def addresses(self, host: str, port: int) -> list[Address]:
        """At least one; of several each comes first in turn. Raises OSError, and UnicodeError for what is no name."""
        if (literal := _literal(host, port)) is not None:
            return [literal]
        key = (host, port)
        known = self._known.get(key)
        if known is None or known.fresh_until <= self._loop.time():
            known = await self._ask(key, known)
        found = known.addresses
        found.append(found.pop(0))
        return [found[-1], *found[:-1]]

    async def _ask(self, key: tuple[str, int], known: _Known | None) -> _Known:
        asking = self._asking.get(key)
        if asking is None:
            host, port = key
            lookup = self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            asking = self._asking[key] = self._loop.create_task(lookup)  # type: ignore[arg-type]
            asking.add_done_callback(partial(self._answered, key))
        if known is not None and known.used_until <= self._loop.time():
            known = None
        # Who is cancelled here does not cancel it for the others.
        await asyncio.wait((asking,), timeout=None if known is None else PATIENCE_S)
        if asking.cancelled():
            raise ConnectionAbortedError("closed while a name was looked up")
        if asking.done() and (known is None or not _is_momentary(asking.exception())):
            found = asking.result()
            if not found:
                raise OSError("a name without an address")
            return self._known.get(key) or self._keep(key, found)
        assert known is not None
        # The next ones need not wait as long for what does not come.
        used = self._known[key] = known._replace(fresh_until=self._loop.time() + KNOWN_FOR_S)
        return used

    def close(self) -> None:
        for asking in self._asking.values():
            asking.cancel()

    def _answered(self, key: tuple[str, int], asked: asyncio.Task[list[Address]]) -> None:
        del self._asking[key]
        fault = None if asked.cancelled() else asked.exception()
        if asked.cancelled() or _is_momentary(fault):
            return
        if fault is None and asked.result():
            self._keep(key, asked.result())
        else:
            self._known.pop(key, None)

    def _keep(self, key: tuple[str, int], found: list[Address]) -> _Known:
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        now = self._loop.time()
        known = self._known[key] = _Known(found, now + KNOWN_FOR_S, now + STILL_USED_S)
        return known


def _is_momentary(fault: BaseException | None) -> bool:
    """Whether it tells nothing of the name."""
    return isinstance(fault, OSError) and (
        not isinstance(fault, socket.gaierror) or fault.errno in (socket.EAI_AGAIN, socket.EAI_SYSTEM)
    )


def _literal(host: str, port: int) -> Address | None:
    try:
        if ":" not in host:
            socket.inet_pton(socket.AF_INET, host)
            return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port)
        socket.inet_pton(socket.AF_INET6, host)
        return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port, 0, 0)
    except (OSError, UnicodeError):
        return None  # a name, or an address that names its link
