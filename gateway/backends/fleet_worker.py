"""Our own worker: internal headers under the fleet token, usage by meter comments (see worker/protocol/usage.py)."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.apis import Api
from gateway.backends import faults, openai_errors
from gateway.backends.backend import Order, Outgoing
from gateway.backends.faults import BackendFault
from gateway.backends.mending import Mending
from gateway.backends.openai_reader import EventReader
from gateway.backends.transport import Transport
from gateway.billing.usage import TokenUsage
from gateway.routing.route import Endpoint
from worker.protocol import headers, token_counting
from worker.protocol.sse import MEDIA_TYPE
from worker.protocol.usage import decode_meter

MOST_COUNTING = 64 * 1024 * 1024
"""Bytes of what a worker tells of its tokenizer."""
CONNECT_S = 2.0
PATHS: Final[dict[Api, str]] = {
    "chat_completions": "/v1/chat/completions",
    "responses": "/v1/chat/completions",
    "messages": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
}


class FleetWorker:
    """Nothing of the caller's own headers is passed on."""

    def __init__(self, fleet_token: str | None) -> None:
        self._base = {"content-type": "application/json", "accept": MEDIA_TYPE, "accept-encoding": "identity"}
        if fleet_token is not None:
            self._base["authorization"] = f"Bearer {fleet_token}"

    def outgoing(self, order: Order, endpoint: Endpoint, model: str) -> Outgoing:
        sent = self._base | {
            headers.REQUEST_ID: order.request_id,
            headers.TENANT_SALT: order.salt,
            headers.TENANT: order.tenant,
            headers.WEIGHT: f"{order.weight:g}",
            headers.METER: "1",
        }
        if order.clamp_output:
            sent[headers.CLAMP_OUTPUT] = "1"
        body = order.words() | {"model": msgspec.Raw(msgspec.json.encode(model))}
        if order.clamp_output and order.output_cap is not None:
            body["max_tokens"] = msgspec.Raw(b"%d" % order.output_cap)
        return Outgoing(endpoint.base_url + PATHS[order.api], sent, msgspec.json.encode(body))

    def reader(self, order: Order, endpoint: Endpoint, media_type: str) -> EventReader:
        if media_type != MEDIA_TYPE:
            raise faults.malformed("answered with something that is not an event stream")
        return EventReader(order, meter=_metered, translator=Mending(order.from_chat()) if order.from_chat else None)

    def refusal(self, endpoint: Endpoint, status: int, body: bytes | None, retry_after: str | None) -> BackendFault:
        # All workers know the same token and the same models.
        return openai_errors.refusal(status, body, retry_after, elsewhere=False)

    def probe(self, endpoint: Endpoint) -> tuple[str, dict[str, str]]:
        return endpoint.base_url + "/health", {}

    async def counting(self, transport: Transport, endpoint: Endpoint) -> bytes:
        """What the worker tells of its tokenizer; see ``worker.protocol.token_counting``. Raises BackendFault."""
        reply = await transport.get(endpoint.base_url + token_counting.PATH, headers=self._base, connect_s=CONNECT_S)
        try:
            if reply.status != 200:
                raise faults.malformed(f"answered {reply.status} when asked for its tokenizer")
            body = await reply.read_limited(MOST_COUNTING)
            if body is None:
                raise faults.malformed("tells more of its tokenizer than is taken")
            return body
        finally:
            reply.close()


def _metered(comment: bytes) -> TokenUsage | None:
    reading = decode_meter(comment)
    if reading is None:
        return None
    return TokenUsage(
        reading.prompt_tokens, reading.completion_tokens, reading.cached_tokens, compute_us=reading.compute_us
    )
