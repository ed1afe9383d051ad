"""``POST /v1/messages/count_tokens``: what a prompt would count, without running it; nothing is charged.

Exactly so where the model's tokenizer is known here, else as a backend of the route counts that speaks Anthropic's API,
else an estimate; the header ``x-penstock-counted-by`` tells which.
Reference: https://docs.claude.com/en/api/messages-count-tokens
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.ask import Ask
from gateway.backends.prompt_counts import PromptCounts
from gateway.http.anthropic.ask import parse_messages
from gateway.http.anthropic.door import REQUEST_ID
from gateway.http.anthropic.errors import encode_error
from gateway.http.anthropic.reference import CountOperation
from gateway.http.client import Client, ClientGone
from gateway.http.inference import JSON, BodyLimits
from gateway.ids import uuid7
from gateway.long_work import worked
from gateway.pipeline import Pipeline
from gateway.tenants.principal import Principal
from worker.protocol.errors import ApiError, server_error

COUNTED_BY: Final = "x-penstock-counted-by"
MOST_AT_ONCE: Final = 16
"""Of one tenant, on one replica: counting is free, and takes time and memory."""
_log = structlog.get_logger("gateway.request")


def count_tokens_handler(pipeline: Pipeline, counts: PromptCounts, limits: BodyLimits) -> HTTPRouteHandler:
    turns = _Turns()

    @post(
        "/v1/messages/count_tokens",
        status_code=200,
        media_type=JSON,
        operation_class=CountOperation,
        operation_id="countMessageTokens",
        summary="Count the tokens of a message's prompt",
        tags=["Messages"],
    )
    async def count_tokens(request: Request[Any, Any, Any]) -> ASGIApp:
        return _Counting(pipeline, counts, limits, turns)

    return count_tokens


class _Turns:
    """How many prompts of each tenant are being counted."""

    def __init__(self) -> None:
        self._taken: Counter[UUID] = Counter()

    @contextlib.contextmanager
    def take(self, tenant_id: UUID) -> Iterator[None]:
        """Raises ApiError (429)."""
        if self._taken[tenant_id] >= MOST_AT_ONCE:
            raise ApiError(
                429,
                f"{MOST_AT_ONCE} prompts of your organisation are being counted. Wait until one of them is.",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        self._taken[tenant_id] += 1
        try:
            yield
        finally:
            self._taken[tenant_id] -= 1
            if not self._taken[tenant_id]:
                del self._taken[tenant_id]


class _Counting:
    """Answers one request. An ASGI app of its own, for it reads the body within limits, once the key is known."""

    def __init__(self, pipeline: Pipeline, counts: PromptCounts, limits: BodyLimits, turns: _Turns) -> None:
        self._pipeline = pipeline
        self._counts = counts
        self._limits = limits
        self._turns = turns
        self._id = str(uuid7())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, receive, send)
        with contextlib.suppress(ClientGone):
            try:
                tokens, by = await self._count(client)
            except ApiError as error:
                await self._refuse(client, error)
            except ClientGone:
                raise
            except Exception:
                _log.exception("request_crashed", request_id=self._id)
                message = f"The gateway failed. The operator finds the cause under request id {self._id}."
                await self._refuse(client, server_error(message))
            else:
                body = msgspec.json.encode({"input_tokens": tokens})
                await client.answer(200, body, [*self._headers(), (COUNTED_BY, by)], media_type=JSON)

    async def _count(self, client: Client) -> tuple[int, str]:
        with contextlib.ExitStack() as turn:
            return await self._in_turn(client, turn)

    async def _in_turn(self, client: Client, turn: contextlib.ExitStack) -> tuple[int, str]:
        async def read(principal: Principal) -> Ask:
            turn.enter_context(self._turns.take(principal.tenant_id))
            raw = await client.read_json(self._limits.bytes, within_s=self._limits.within_s)
            return await worked(len(raw), partial(parse_messages, raw, counting=True))

        ask, route, prompt = await self._pipeline.prompt(client.key(), read)
        if prompt.counted_by is not None:
            return prompt.tokens, "tokenizer"
        counted = await self._counts.count(ask, route)
        return counted.tokens, counted.by

    async def _refuse(self, client: Client, error: ApiError) -> None:
        headers = [*self._headers(), *error.headers.items()]
        await client.answer(error.status, encode_error(error, self._id), headers, media_type=JSON)

    def _headers(self) -> list[tuple[str, str]]:
        return [("x-request-id", self._id), (REQUEST_ID, self._id)]
