"""``POST /v1/messages``.

References: https://docs.claude.com/en/api/messages, https://docs.claude.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final
from uuid import UUID

import msgspec

from gateway.answerable import Answerable
from gateway.ask import Ask
from gateway.http.anthropic.ask import parse_messages
from gateway.http.anthropic.errors import encode_error, status_of
from gateway.http.anthropic.reference import MessagesOperation
from gateway.http.client import Client
from gateway.http.inference import Reference
from gateway.http.openai.fields import END_USER_HEADER, TAGS_HEADER
from gateway.long_work import worked
from gateway.tenants.principal import Principal
from worker.protocol.errors import ApiError
from worker.protocol.sse import encode_event

MESSAGES = Reference("/v1/messages", MessagesOperation, "createMessage", "Create a message", "Messages")
REQUEST_ID: Final = "request-id"
_PING: Final = encode_event(b'{"type": "ping"}', event=b"ping")
_TYPE = re.compile(rb'\s*\{\s*"type"\s*:\s*"([a-z_]{1,64})"')
"""Of an event whose type stands first, as it does in all that Anthropic sends and in ours."""


class MessagesDoor:
    def __init__(self, request_id: UUID, client: Client) -> None:
        self._request_id = str(request_id)
        self._client = client

    async def ask(self, raw: bytes, principal: Principal) -> Ask:
        end_user, tags = self._client.text(END_USER_HEADER), self._client.text(TAGS_HEADER)
        return await worked(len(raw), partial(parse_messages, raw, end_user=end_user, tags=tags))

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(REQUEST_ID, self._request_id)]

    def event(self, data: bytes) -> bytes:
        return encode_event(data, event=_type_of(data))

    @property
    def last(self) -> bytes:
        return b""

    @property
    def sign_of_life(self) -> bytes:
        return _PING

    def status(self, error: ApiError) -> int:
        return status_of(error)

    def error(self, error: ApiError) -> bytes:
        return encode_error(error, self._request_id)

    def error_event(self, error: ApiError) -> bytes:
        return encode_event(self.error(error), event=b"error")

    def deliver(self, answer: Answerable) -> Answerable:
        return answer


def _type_of(data: bytes) -> bytes:
    if found := _TYPE.match(data):
        return found[1]
    try:
        event: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return b""
    kind = event.get("type") if isinstance(event, dict) else None
    return kind.encode() if isinstance(kind, str) and kind.isidentifier() else b""
