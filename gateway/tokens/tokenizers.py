"""Which ways of counting are at hand: each is fetched and built once, beside the requests that want it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Final

import structlog

from gateway.routing.route import Endpoint, Route
from gateway.tokens.encoding import PUBLISHED, published_encoding
from gateway.tokens.methods import Method, OpenAIMethod, WorkerMethod
from worker.protocol.token_counting import decode_counting

BACKEND: Final = "backend"
FETCH_TIMEOUT_S: Final = 10.0
FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 300.0
MODELS: Final = 64
"""Fingerprints remembered at most."""

_log = structlog.get_logger(__name__)


class Tokenizers:
    """An async context manager: what is being fetched ends with it."""

    def __init__(
        self, endpoints: Callable[[str], Sequence[Endpoint]], fetch: Callable[[Endpoint], Awaitable[bytes]]
    ) -> None:
        self._endpoints = endpoints
        self._fetch = fetch
        self._known: dict[str, Method] = {}
        """By name of an encoding, or by a model's fingerprint."""
        self._learning: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, tuple[float, float]] = {}
        """What could not be had: when to try again, on the loop's clock, and how long the pause was."""
        self._distrusted: set[tuple[str, str]] = set()
        """By names of the route and the method."""
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Tokenizers:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._learning.values():
            task.cancel()
        await self._tasks.__aexit__(None, None, None)

    def ready(self, route: Route) -> list[Method] | None:
        """What counts the route's prompts, whichever of its backends gets them. None: not yet, or nothing does; what
        is missing is sought meanwhile."""
        if route.tokenizer is None:
            return None
        if route.tokenizer != BACKEND:
            return self._published(route.name, route.tokenizer)
        found: dict[str, Method] = {}
        complete = True
        for endpoint in (endpoint for target in route.targets for endpoint in self._endpoints(target.pool)):
            method = self._known.get(endpoint.fingerprint)
            if method is not None:
                found[method.name] = method
                continue
            complete = False
            if endpoint.fingerprint:
                self._learn(endpoint.fingerprint, partial(self._ask, endpoint))
        if not found or not complete or any((route.name, name) in self._distrusted for name in found):
            return None
        return list(found.values())

    def distrust(self, route: str, name: str) -> None:
        """Use the method of that name no more for the route."""
        self._distrusted.add((route, name))

    def _published(self, route: str, name: str) -> list[Method] | None:
        method = self._known.get(name)
        if method is None and name in PUBLISHED:
            self._learn(name, partial(asyncio.to_thread, _openai, name))
        return None if method is None or (route, name) in self._distrusted else [method]

    async def _ask(self, endpoint: Endpoint) -> Method:
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            raw = await self._fetch(endpoint)
        return await asyncio.to_thread(_worker, raw)

    def _learn(self, key: str, learn: Callable[[], Awaitable[Method]]) -> None:
        again, _ = self._pauses.get(key, (0.0, 0.0))
        if key not in self._learning and asyncio.get_running_loop().time() >= again:
            self._learning[key] = self._tasks.create_task(self._keep(key, learn), name=f"tokenizer-{key}")

    async def _keep(self, key: str, learn: Callable[[], Awaitable[Method]]) -> None:
        try:
            method = await learn()
        except Exception as fault:
            # A worker may tell anything, and a task that raises would end its group. Prompts stay bounded by bytes.
            _, pause = self._pauses.get(key, (0.0, FIRST_PAUSE_S / 2))
            pause = min(pause * 2, LONGEST_PAUSE_S)
            self._pauses[key] = (asyncio.get_running_loop().time() + pause, pause)
            _log.warning("tokenizer_not_learned", tokenizer=key, reason=str(fault) or type(fault).__name__)
        else:
            self._pauses.pop(key, None)
            if len(self._known) >= MODELS:
                del self._known[next(iter(self._known))]
            self._known[key] = method
            _log.info("tokenizer_learned", tokenizer=key, method=method.name)
        finally:
            del self._learning[key]


def _openai(name: str) -> Method:
    return OpenAIMethod(published_encoding(name))


def _worker(raw: bytes) -> Method:
    return WorkerMethod(decode_counting(raw))
