"""Which requests the cache is for, and which answers are good enough to be given again.

Each reason is one word, for metrics.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.apis import Api
from gateway.cache.parts import Facts
from gateway.policies.answer_cache import CacheRules

_TIED: Final = ("previous_response_id", "conversation", "background")
"""Fields by which a response is more than an answer to what stands in its request."""
_LIVE: Final = ("web_search_options", "mcp_servers")
_CLIENT_TOOLS: Final = (None, "function", "custom")
"""Kinds of tools that the client runs, each call by itself."""


def why_not_asked(api: Api, fields: dict[str, Any], rules: CacheRules) -> str | None:
    """Why the cache leaves a request alone; None: it doesn't. ``fields``: the body, decoded, floats as they came."""
    if api == "responses" and (fields.get("store") is not False or any(fields.get(field) for field in _TIED)):
        return "stored"
    if api == "embeddings":
        return None
    if not rules.sampled and not _is_zero(fields.get("temperature")):
        return "sampled"
    return "live_tools" if not rules.time_words and _looks_around(fields) else None


def why_not_kept(rules: CacheRules, facts: Facts, size: int) -> str | None:
    """Why an answer is not kept; None: it is. ``size``: its bytes."""
    if size > rules.max_answer_bytes:
        return "too_long"
    if facts.truncated:
        return "truncated"
    if facts.refused:
        return "refused"
    if facts.has_tool_calls and not rules.tool_calls:
        return "tool_calls"
    return None if facts.complete else "unfinished"


def _looks_around(fields: dict[str, Any]) -> bool:
    """Whether the backend itself may go and look, on the web for one: its answer is of that moment."""
    tools = fields.get("tools")
    kinds = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return any(fields.get(field) is not None for field in _LIVE) or any(kind not in _CLIENT_TOOLS for kind in kinds)


def _is_zero(temperature: Any) -> bool:
    """A temperature that is left out is the API's default, which is above 0 in all of them."""
    if isinstance(temperature, msgspec.Raw):
        return float(bytes(temperature)) == 0
    return isinstance(temperature, int) and not isinstance(temperature, bool) and temperature == 0
