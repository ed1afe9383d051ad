"""Estimates of prompts; counts that a backend tells are tested at the door, in ``http/anthropic``."""

from __future__ import annotations

import json
import time
from typing import Any

from gateway.backends.prompt_counts import IMAGE_TOKENS, Counted, PromptCounts
from gateway.backends.transport import Transport
from gateway.http.anthropic.ask import parse_messages
from gateway.routing.route import Route


async def estimate(content: Any, **fields: Any) -> Counted:
    request = {"model": "m", "messages": [{"role": "user", "content": content}]} | fields
    ask = parse_messages(json.dumps(request).encode(), counting=True)
    return await PromptCounts(Transport(), lambda pool: []).count(ask, Route("m", "pool", "m", 1000, 50, 500, 30.0))


async def test_text_counts_by_its_bytes_and_media_by_its_number() -> None:
    short, long = await estimate("a"), await estimate("a b " * 1000)
    assert short.by == "estimate"
    assert long.tokens - short.tokens == 1000
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 100_000}}
    pictured = await estimate([image, image])
    assert 2 * IMAGE_TOKENS < pictured.tokens < 2 * IMAGE_TOKENS + 100
    tools = [{"name": "f", "description": "d " * 2000, "input_schema": {"type": "object"}}]
    assert (await estimate("a", system="s " * 200, tools=tools)).tokens > short.tokens + 1100


async def test_no_text_takes_long() -> None:
    began = time.process_time()
    await estimate(("A" * 999 + " ") * 12_000)
    assert time.process_time() - began < 2  # a search from every byte would take some 10 s


async def test_a_long_prompt_counts_as_its_pieces_do() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 3_000_000}}
    pictured = await estimate([{"type": "text", "text": "a b " * 1_000_000}, image])
    assert 1_000_000 + IMAGE_TOKENS <= pictured.tokens < 1_000_000 + IMAGE_TOKENS + 100
