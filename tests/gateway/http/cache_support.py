"""What tests of the answer cache through the doors share: a backend that speaks all APIs, and how to wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from gateway.cache.service import AnswerCache
from gateway.policies.answer_cache import CachePolicy
from gateway.redis_url import client
from tests.gateway.conftest import chunk_event
from worker.protocol.usage import MeterReading, encode_meter

CHAT = "/v1/chat/completions"
MISSES = ("miss", "unavailable")


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0} | fields


@contextlib.contextmanager
def patient() -> Any:
    """Look-ups may take long: a busy machine is no fault of the cache."""
    with pytest.MonkeyPatch.context() as patch:
        defaults = AnswerCache.__init__.__kwdefaults__
        assert defaults is not None
        patch.setitem(defaults, "limit_s", 20.0)
        yield


def client_of(gateway: Any, key: str | None = None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key or gateway.key}"}
    return httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=20)


async def change(gateway: Any, answer_cache: CachePolicy, tenant: str = "acme") -> None:
    """As an administrator does it, so that the gateway knows at once."""
    async with client_of(gateway, gateway.admin_key) as client:
        answer = await client.patch(
            f"/admin/v1/tenants/{tenant}", json={"answer_cache": msgspec.to_builtins(answer_cache)}
        )
        assert answer.status_code == 200, answer.text


class Kept:
    """The answers that lie in Redis."""

    def __init__(self, url: str) -> None:
        self._url = url

    def names(self) -> set[bytes]:
        with client(self._url) as connected:
            return set(connected.scan_iter("ac:*:a:*", count=1000))

    async def more(self, before: set[bytes], count: int = 1) -> set[bytes]:
        """Waits until so many were added, and gives them."""
        async with asyncio.timeout(10):
            while len(added := self.names() - before) < count:  # noqa: ASYNC110 - Redis tells no event
                await asyncio.sleep(0.02)
        return added


@contextlib.asynccontextmanager
async def being_kept(gateway: Any, count: int = 1) -> AsyncIterator[None]:
    """In it, so many answers are given that will be kept; at its end they are."""
    kept = Kept(gateway.settings.cache_redis_url or gateway.settings.redis_url)
    before = kept.names()
    yield
    await kept.more(before, count)


def _head(c: Any, kind: str) -> dict[str, Any]:
    return {"id": "c-1", "object": kind, "created": 1, "model": "internal", "system_fingerprint": "fp"}


def _tool_calls(streamed: bool) -> list[dict[str, Any]]:
    calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city})},
        }
        for n, city in enumerate(("Paris", "Rome"))
    ]
    return [{"index": n} | call for n, call in enumerate(calls)] if streamed else calls


def _logprobs(words: list[str]) -> dict[str, Any]:
    return {"content": [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []} for word in words]}


WORDS = ["The ", "capital ", "of ", "France ", "is ", "Paris."]
TEXT = "".join(WORDS)


async def model(c: Any) -> None:
    """As our worker does, metered: text, or calls where there are tools; as many choices as are asked for."""
    body = c.body
    if "/v1/embeddings" in c.head:
        vector = {"object": "embedding", "index": 0, "embedding": [0.25, -0.5]}
        usage = {"prompt_tokens": 4, "total_tokens": 4}
        await c.begin()
        await c.send_piece(encode_meter(MeterReading(4, 0)))
        await c.event(json.dumps({"object": "list", "data": [vector], "model": "internal", "usage": usage}).encode())
        await c.done()
        return
    choices = range(body.get("n") or 1)
    usage = {"prompt_tokens": 9, "completion_tokens": 6, "total_tokens": 15}
    await c.begin()
    await c.send_piece(encode_meter(MeterReading(9, 6)))
    if "/v1/completions" in c.head:
        head = _head(c, "text_completion")
        if body.get("stream"):
            for word in WORDS:
                said = [{"index": n, "text": word, "logprobs": None, "finish_reason": None} for n in choices]
                for each in said:
                    await c.event(json.dumps(head | {"choices": [each]}).encode())
            for n in choices:
                last = {"index": n, "text": "", "logprobs": None, "finish_reason": "stop"}
                await c.event(json.dumps(head | {"choices": [last]}).encode())
        else:
            whole = [{"index": n, "text": TEXT, "logprobs": None, "finish_reason": "stop"} for n in choices]
            await c.event(json.dumps(head | {"choices": whole, "usage": usage}).encode())
        await c.done()
        return
    tools, logprobs = bool(body.get("tools")), bool(body.get("logprobs"))
    finish = "tool_calls" if tools else body.get("finish") or "stop"
    if not body.get("stream"):
        message: dict[str, Any] = {"role": "assistant", "content": None if tools else TEXT}
        if tools:
            message["tool_calls"] = _tool_calls(streamed=False)
        choice: dict[str, Any] = {"message": message, "finish_reason": finish}
        if logprobs:
            choice["logprobs"] = _logprobs(WORDS)
        whole = [{"index": n} | choice for n in choices]
        await c.event(json.dumps(_head(c, "chat.completion") | {"choices": whole, "usage": usage}).encode())
        await c.done()
        return
    head = _head(c, "chat.completion.chunk")

    async def say(n: int, delta: dict[str, Any], **more: Any) -> None:
        await c.event(
            json.dumps(head | {"choices": [{"index": n, "delta": delta, "finish_reason": None} | more]}).encode()
        )

    for n in choices:
        await say(n, {"role": "assistant", "content": None if tools else ""})
    for n in choices:
        if tools:
            for call in _tool_calls(streamed=True):
                arguments = call["function"]["arguments"]
                await say(n, {"tool_calls": [call | {"function": {"name": "weather", "arguments": ""}}]})
                for cut in (arguments[:5], arguments[5:]):
                    await say(n, {"tool_calls": [{"index": call["index"], "function": {"arguments": cut}}]})
        else:
            for word in WORDS:
                await say(n, {"content": word}, **({"logprobs": _logprobs([word])} if logprobs else {}))
    for n in choices:
        await say(n, {}, finish_reason=finish)
    if (body.get("stream_options") or {}).get("include_usage"):
        await c.event(json.dumps(head | {"choices": [], "usage": usage}).encode())
    await c.done()


__all__ = ["CHAT", "MISSES", "TEXT", "Kept", "asking", "being_kept", "change", "chunk_event", "client_of", "model"]
