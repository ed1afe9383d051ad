"""Tokens of a Messages request whose tokenizer is not known here: as a backend that speaks Anthropic's API counts them,
else estimated.

References: https://docs.claude.com/en/api/messages-count-tokens, https://docs.claude.com/en/docs/build-with-claude/vision
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import msgspec

from gateway.ask import Ask, Body
from gateway.backends.anthropic import VERSION
from gateway.backends.estimates import BYTES_PER_TOKEN
from gateway.backends.faults import BackendFault
from gateway.backends.transport import Transport
from gateway.long_work import worked
from gateway.routing.route import Endpoint, Route

CONNECT_S: Final = 2.0
WITHIN_S: Final = 10.0
IMAGE_TOKENS: Final = 1600
"""About as many as the largest image has."""
_ANSWER_LIMIT: Final = 64 * 1024
_COUNTED: Final = frozenset(
    (
        *("messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"),
        *("cache_control", "context_management", "mcp_servers", "speed"),
    )
)
"""What Anthropic's counting knows of a request."""
_PIECE: Final = 1024 * 1024
"""Bytes that are searched at once: no other thread runs meanwhile."""
_IMAGE = re.compile(rb'"type"\s*:\s*"image"')
_MEDIA = re.compile(rb"(?<![A-Za-z0-9+/=])[A-Za-z0-9+/=]{1000,}+")
"""Data in base64. No text has words as long. Looked for only where a word begins: so each byte is read once."""


@dataclass(frozen=True, slots=True)
class Counted:
    tokens: int
    by: Literal["backend", "estimate"]


class _Count(msgspec.Struct):
    input_tokens: int


_decoder = msgspec.json.Decoder(_Count)


class PromptCounts:
    def __init__(self, transport: Transport, endpoints: Callable[[str], Sequence[Endpoint]]) -> None:
        """``endpoints`` lists those of a pool that seem to work: for one that does not nobody should wait."""
        self._transport = transport
        self._endpoints = endpoints

    async def count(self, ask: Ask, route: Route) -> Counted:
        """Takes ``WITHIN_S`` at most. What the backend cannot do at the moment is estimated."""
        counting = (
            (endpoint, endpoint.sends_model or target.backend_model)
            for target in route.targets
            for endpoint in self._endpoints(target.pool)
            if endpoint.family == "anthropic"
        )
        endpoint, model = next(counting, (None, ""))
        tokens = None if endpoint is None else await self._told(ask, endpoint, model)
        if tokens is not None:
            return Counted(tokens, "backend")
        return await worked(ask.size, partial(_estimated, ask.body))

    async def _told(self, ask: Ask, endpoint: Endpoint, model: str) -> int | None:
        body = await worked(ask.size, partial(_counted_body, ask.body, model))
        headers = {
            "content-type": "application/json",
            "accept": "application/json",
            "accept-encoding": "identity",
            "anthropic-version": VERSION,
            **endpoint.headers,
        }
        url = endpoint.base_url + "/v1/messages/count_tokens"
        try:
            async with asyncio.timeout(WITHIN_S):
                reply = await self._transport.post(url, headers=headers, body=body, connect_s=CONNECT_S)
                try:
                    answer = await reply.read_limited(_ANSWER_LIMIT)
                finally:
                    reply.close()
            told = _decoder.decode(answer or b"").input_tokens if reply.status == 200 else -1
        except (BackendFault, TimeoutError, msgspec.DecodeError):
            return None
        return told if told >= 0 else None


def _counted_body(body: Body, model: str) -> bytes:
    sent = {name: value for name, value in body.items() if name in _COUNTED}
    return msgspec.json.encode(sent | {"model": model})


def _estimated(body: Body) -> Counted:
    """By bytes, media by their number."""
    size = images = 0
    for field in ("messages", "system", "tools"):
        raw = bytes(body.get(field, b""))
        for at in range(0, len(raw), _PIECE):
            piece = raw[at : at + _PIECE]
            images += len(_IMAGE.findall(piece))
            size += len(_MEDIA.sub(b"", piece))
    return Counted(-(-size // BYTES_PER_TOKEN) + images * IMAGE_TOKENS, "estimate")
