"""Our own worker: internal headers under the fleet token, usage by meter comments (see worker/protocol/usage.py)."""

from __future__ import annotations

from gateway.backends import faults
from gateway.backends.backend import Order
from gateway.backends.transport import Transport
from gateway.billing.usage import TokenUsage
from gateway.routing.route import Endpoint
from worker.protocol import headers, token_counting
from worker.protocol.sse import MEDIA_TYPE
from worker.protocol.usage import decode_meter

MOST_COUNTING = 64 * 1024 * 1024
"""Bytes of what a worker tells of its tokenizer."""


class FleetWorker:
    """Nothing of the caller's own headers is passed on."""

    def __init__(self, fleet_token: str | None) -> None:
        self._base = {"content-type": "application/json", "accept": MEDIA_TYPE, "accept-encoding": "identity"}
        if fleet_token is not None:
            self._base["authorization"] = f"Bearer {fleet_token}"

    def url(self, endpoint: Endpoint) -> str:
        return endpoint.base_url + "/v1/chat/completions"

    def headers(self, order: Order) -> dict[str, str]:
        sent = self._base | {
            headers.REQUEST_ID: order.request_id,
            headers.TENANT_SALT: order.salt,
            headers.TENANT: order.tenant,
            headers.WEIGHT: f"{order.weight:g}",
            headers.METER: "1",
        }
        if order.clamp_output:
            sent[headers.CLAMP_OUTPUT] = "1"
        return sent

    def reading(self, comment: bytes) -> TokenUsage | None:
        reading = decode_meter(comment)
        if reading is None:
            return None
        return TokenUsage(
            reading.prompt_tokens, reading.completion_tokens, reading.cached_tokens, compute_us=reading.compute_us
        )

    async def counting(self, transport: Transport, endpoint: Endpoint) -> bytes:
        """What the worker tells of its tokenizer; see ``worker.protocol.token_counting``. Raises BackendFault."""
        reply = await transport.get(endpoint.base_url + token_counting.PATH, headers=self._base)
        try:
            if reply.status != 200:
                raise faults.malformed(f"answered {reply.status} when asked for its tokenizer")
            body = await reply.read_limited(MOST_COUNTING)
            if body is None:
                raise faults.malformed("tells more of its tokenizer than is taken")
            return body
        finally:
            reply.close()
