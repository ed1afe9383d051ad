"""``POST /v1/messages/count_tokens``: what a prompt would count, without running it; nothing is charged.

Exactly so where the model's tokenizer is known here, else as a backend of the route counts that speaks Anthropic's API,
else an estimate; the header ``x-penstock-counted-by`` tells which.
Reference: https://docs.claude.com/en/api/messages-count-tokens
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Final

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
_log = structlog.get_logger("gateway.request")


def count_tokens_handler(pipeline: Pipeline, counts: PromptCounts, limits: BodyLimits) -> HTTPRouteHandler:
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
        return _Counting(pipeline, counts, limits)

    return count_tokens


class _Counting:
    """Answers one request. An ASGI app of its own, for it reads the body within limits, once the key is known."""

    def __init__(self, pipeline: Pipeline, counts: PromptCounts, limits: BodyLimits) -> None:
        self._pipeline = pipeline
        self._counts = counts
        self._limits = limits
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
        async def read(principal: Principal) -> Ask:
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
