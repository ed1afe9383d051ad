"""Anthropic's Messages API, and servers that speak it: asked natively, or for a chat completion by translation.

The backend's headers bear its key (``x-api-key``), and may name another ``anthropic-version`` or ``anthropic-beta``s.
Nothing of the caller's own headers is passed on. References: https://platform.claude.com/docs/en/api/messages,
https://platform.claude.com/docs/en/api/versioning
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.ask import Translator, given
from gateway.backends import anthropic_errors, faults
from gateway.backends.anthropic_reader import MessageBody, MessageEvents
from gateway.backends.backend import Order, Outgoing, Reader
from gateway.backends.faults import BackendFault
from gateway.backends.mending import Mending
from gateway.clock import Clock, SystemClock
from gateway.routing.route import Endpoint
from gateway.translation.chain import Chain
from gateway.translation.chat_answer import ChatAnswer
from gateway.translation.messages_request import messages_request
from worker.protocol.errors import bad_request
from worker.protocol.sse import MEDIA_TYPE

VERSION: Final = "2023-06-01"
JSON: Final = "application/json"
NO_SECRETS: Final = frozenset(("anthropic-version", "anthropic-beta", "user-agent"))
"""Headers of a backend whose values an answer may repeat."""


class Anthropic:
    def __init__(self, clock: Clock | None = None) -> None:
        """``clock``: when an answer was made, which Anthropic does not tell and a chat completion does."""
        self._clock = clock or SystemClock()

    def outgoing(self, order: Order, endpoint: Endpoint, model: str) -> Outgoing:
        headers = {
            "content-type": JSON,
            "accept": MEDIA_TYPE if order.streamed else JSON,
            "accept-encoding": "identity",
            "anthropic-version": VERSION,
            **endpoint.headers,
            "x-request-id": order.request_id,
        }
        return Outgoing(endpoint.base_url + "/v1/messages", headers, _body(order, model))

    def reader(self, order: Order, endpoint: Endpoint, media_type: str) -> Reader:
        translator = self._translator(order)
        secrets = _secrets(endpoint)
        if order.streamed and media_type == MEDIA_TYPE:
            return MessageEvents(order, translator=translator, secrets=secrets)
        if not order.streamed and media_type == JSON:
            return MessageBody(order, translator=translator, secrets=secrets)
        wanted = "an event stream" if order.streamed else "JSON"
        raise faults.malformed(f"answered with something that is not {wanted}")

    def refusal(self, endpoint: Endpoint, status: int, body: bytes | None, retry_after: str | None) -> BackendFault:
        return anthropic_errors.refusal(status, body, retry_after, secrets=_secrets(endpoint))

    def probe(self, endpoint: Endpoint) -> tuple[str, dict[str, str]]:
        return endpoint.base_url + "/v1/models?limit=1", {"anthropic-version": VERSION, **endpoint.headers}

    def _translator(self, order: Order) -> Translator | None:
        if order.api == "messages":
            return None
        chat = order.chat or {}
        answer = ChatAnswer(
            order.model,
            int(self._clock.now().timestamp()),
            include_usage=order.include_usage,
            legacy=given(chat, "functions") and not given(chat, "tools"),
        )
        return Mending(answer if order.from_chat is None else Chain(answer, order.from_chat()))


def _body(order: Order, model: str) -> bytes:
    """Raises ApiError (400)."""
    if order.api == "messages":
        written = {"model": msgspec.Raw(msgspec.json.encode(model))}
        if order.output_cap is not None:
            written["max_tokens"] = msgspec.Raw(b"%d" % order.output_cap)
        return msgspec.json.encode(order.body | written)
    if order.output_cap is None:
        raise bad_request("This model cannot be asked for anything but a chat. Ask another one.")
    return messages_request(order.words(), model=model, max_tokens=order.output_cap, stream=order.streamed)


def _secrets(endpoint: Endpoint) -> list[str]:
    return [value for name, value in endpoint.headers.items() if name not in NO_SECRETS and len(value) >= 8]
