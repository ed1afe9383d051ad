"""Models as Anthropic's clients expect them. Reference: https://docs.claude.com/en/api/models-list"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gateway.routing.route import Route
from worker.protocol.errors import bad_request

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str = "1970-01-01T00:00:00Z"
    """What Anthropic's reference has for a date that is not known."""
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(route: Route) -> ModelInfo:
    return ModelInfo(
        id=route.name,
        display_name=route.name,
        max_input_tokens=route.context_length,
        max_tokens=route.max_output_tokens,
    )


def model_page(routes: Sequence[Route], limit: str | None, before_id: str | None, after_id: str | None) -> ModelPage:
    """Those right before or right after a name, whether that one is there or not. Raises ApiError (400)."""
    if before_id is not None and after_id is not None:
        raise bad_request("'before_id' and 'after_id' exclude each other.", param="before_id")
    size = DEFAULT_LIMIT
    if limit is not None:
        if not (limit.isascii() and limit.isdecimal() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LIMIT):
            raise bad_request(f"'limit' must be an integer from 1 to {MAX_LIMIT}.", param="limit")
        size = int(limit)
    found = sorted(routes, key=lambda route: route.name)
    if before_id is not None:
        found = [route for route in found if route.name < before_id]
        page = found[-size:]
    else:
        found = [route for route in found if after_id is None or route.name > after_id]
        page = found[:size]
    return ModelPage(
        data=[model_info(route) for route in page],
        has_more=len(found) > len(page),
        first_id=page[0].name if page else None,
        last_id=page[-1].name if page else None,
    )
