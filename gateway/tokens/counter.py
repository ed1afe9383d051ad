"""How many tokens a prompt has at most: exactly those that it has, where its tokenizer is known, else by its bytes.

Never fewer than it turns out to have. So much is reserved before a request runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from gateway.ask import Ask
from gateway.long_work import is_short, worked
from gateway.routing.route import Endpoint, Route
from gateway.tokens import chat, inputs
from gateway.tokens.cache import CountCache
from gateway.tokens.encoding import Encoding
from gateway.tokens.media import image_tokens
from gateway.tokens.methods import Allowance, Body, Method
from gateway.tokens.tokenizers import Tokenizers

LONG: Final = 16 * 1024
"""Bytes of messages from which they are counted in a thread: about 1 ms of work."""
THREADS: Final = 2
_FEWEST_BYTES_PER_TOKEN: Final = 16
"""Of more bytes for each token of the context than that, hardly any text fits: counting it would be idle."""
_NOTHING: Final = frozenset((b"null", b"[]"))

_log = structlog.get_logger(__name__)


class PromptBound(msgspec.Struct, frozen=True):
    """``tokens``: most that the prompt has."""

    tokens: int
    images: int = 0
    counted_by: str | None = None
    """Name of the method by which it was counted; None: it is bounded by its bytes, or by the context."""
    each: int | None = None
    """Most tokens that any one of several prompts has."""

    @property
    def longest(self) -> int:
        """Most tokens that are in the context at once."""
        return self.tokens if self.each is None else self.each


class PromptCounter:
    """One for the whole gateway; an async context manager."""

    def __init__(
        self, endpoints: Callable[[str], Sequence[Endpoint]], fetch: Callable[[Endpoint], Awaitable[bytes]]
    ) -> None:
        """``endpoints`` lists those of a pool that are alive; ``fetch`` gets what one of them tells of its tokenizer,
        as ``worker.protocol.token_counting`` has it.
        """
        self._tokenizers = Tokenizers(endpoints, fetch)
        self._cache = CountCache()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="count-prompts")

    async def __aenter__(self) -> PromptCounter:
        await self._tokenizers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tokenizers.__aexit__(kind, fault, trace)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def bound(self, ask: Ask, route: Route, context_length: int, *, tenant: bytes, exactly: bool) -> PromptBound:
        """For a request of which at most ``context_length`` tokens are taken.

        ``exactly``: whether to count, where that can be done; else bytes will do. ``tenant`` has at most 64 bytes.
        Raises ApiError (400) for a message that is no object.
        """
        if ask.api == "messages" and ask.chat is None:
            # What no chat completion can say may come from elsewhere: files, searches, tools of the backend's own.
            return PromptBound(context_length, await worked(ask.size, partial(_images, bytes(ask.body["messages"]))))
        if ask.chat is None:
            return await self._inputs(ask, route, context_length, tenant, exactly)
        body, size = ask.chat, ask.size
        methods = self._tokenizers.ready(route) if exactly else None
        raw = bytes(body["messages"])
        if methods and len(raw) <= _FEWEST_BYTES_PER_TOKEN * context_length and chat.few_objects(raw):
            if len(raw) < LONG:
                found = self._counted(raw, body, route, tenant, methods)
            else:
                found = await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._counted, raw, body, route, tenant, methods
                )
            if found is not None:
                return found if found.tokens < context_length else PromptBound(context_length, found.images)
        allowances = [each.allowance for each in methods or ()]
        if is_short(size):
            return _by_bytes(raw, body, size, route, context_length, allowances)
        return await worked(size, partial(_by_bytes, raw, body, size, route, context_length, allowances))

    async def _inputs(self, ask: Ask, route: Route, context_length: int, tenant: bytes, exactly: bool) -> PromptBound:
        """Of prompts that are no chat, each of which counts once, however many choices go on with it."""
        found = None
        methods = self._tokenizers.ready(route) if exactly else None
        if methods and ask.size < LONG:
            found = self._counted_inputs(ask, context_length, tenant, methods)
        elif methods:
            found = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._counted_inputs, ask, context_length, tenant, methods
            )
        if found is not None:
            return found
        sizes = inputs.by_bytes(ask.inputs, ask.body, context_length)
        return PromptBound(sum(sizes), each=max(sizes))

    def told(self, bound: PromptBound, route: Route, tokens: int) -> None:
        """A backend counted ``tokens`` in a prompt. One that has more than were counted here unmasks its method, which
        is not used again for the route."""
        if bound.counted_by is not None and tokens > bound.tokens:
            _log.error(
                "prompt_counted_short", route=route.name, method=bound.counted_by, counted=bound.tokens, told=tokens
            )
            self._tokenizers.distrust(route.name, bound.counted_by)

    def _counted(
        self, raw: bytes, body: Body, route: Route, tenant: bytes, methods: Sequence[Method]
    ) -> PromptBound | None:
        """By the method that counts most: any of the pool's workers may get the request."""
        messages = chat.read_messages(raw)
        most, name = 0, ""
        for method in methods:
            found = method.count(
                messages, body, route.backend_model, lambda encoding, text: self._cache.count(encoding, text, tenant)
            )
            if found is None:
                return None
            if found >= most:
                most, name = found, method.name
        return PromptBound(most, chat.count_images(raw), name)

    def _counted_inputs(
        self, ask: Ask, context_length: int, tenant: bytes, methods: Sequence[Method]
    ) -> PromptBound | None:
        """By the method that counts most, as ``_counted``."""
        texts = inputs.are_texts(ask.inputs)
        found: list[PromptBound] = []

        def count(encoding: Encoding, text: str) -> int:
            return self._cache.count(encoding, text, tenant)

        def size(method: Method, entry: bytes) -> int:
            if not texts:
                return inputs.count_ids(entry)
            if len(entry) > _FEWEST_BYTES_PER_TOKEN * context_length:
                return context_length
            return method.count_text(msgspec.json.decode(entry, type=str), count)

        for method in methods:
            around = method.count_around(ask.body, count, texts=texts)
            if around is None:
                return None
            sizes = [min(around + size(method, entry), context_length) for entry in ask.inputs]
            found.append(PromptBound(sum(sizes), 0, method.name, max(sizes)))
        most = max(found, key=lambda bound: bound.tokens)
        return replace(most, each=max(bound.longest for bound in found))


def _images(raw: bytes) -> int:
    """In messages that may be no chat's."""
    return max(chat.count_images(raw), raw.count(b'"image"'))


def _by_bytes(
    raw: bytes, body: Body, size: int, route: Route, context_length: int, allowances: Sequence[Allowance]
) -> PromptBound:
    """No tokenizer that works on bytes makes more tokens of a text than it has bytes. What is put into the prompt from
    elsewhere is bounded by the context alone.

    Messages are looked at one by one only if their number matters. Raises ApiError (400).
    """
    images = chat.count_images(raw)
    if size >= context_length:
        return PromptBound(context_length, images)
    count = chat.count_messages(raw)
    if bytes(body.get("web_search_options", b"null")) not in _NOTHING or chat.lies_elsewhere(raw):
        return PromptBound(context_length, images)
    most = 0
    for allowance in allowances or (Allowance(),):
        tokens = size + allowance.request_tokens + allowance.message_tokens * count
        nested = _nested_bytes(raw, body) if allowance.nested_tokens_per_byte != 1 else 0
        if nested and not allowance.nested_tokens_per_byte:
            return PromptBound(context_length, images)
        most = max(most, tokens + nested * (allowance.nested_tokens_per_byte - 1))
    if images:
        most += images * image_tokens(route.backend_model)
    return PromptBound(min(most, context_length), images)


def _nested_bytes(raw: bytes, body: Body) -> int:
    tools = bytes(body.get("tools", b""))
    nested = len(tools) if tools not in _NOTHING else 0
    return nested + (len(raw) if b"tool_calls" in raw or b"\\u" in raw else 0)
