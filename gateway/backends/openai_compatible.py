"""Servers that speak OpenAI's API, ours or hosted: vLLM, SGLang, TensorRT-LLM, Ollama, llama.cpp, OpenAI, Google."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.apis import Api
from gateway.ask import Body, given
from gateway.backends import faults, openai_errors
from gateway.backends.backend import Order, Outgoing, Reader
from gateway.backends.brands import BRANDS, Brand
from gateway.backends.faults import BackendFault
from gateway.backends.lenient_json import decoded, encoded
from gateway.backends.mending import Mending
from gateway.backends.openai_reader import EventReader, GatheringReader, WholeReader
from gateway.clock import Clock, SystemClock
from gateway.routing.route import Endpoint
from worker.protocol.headers import REQUEST_ID
from worker.protocol.sse import MEDIA_TYPE

PATHS: Final[dict[Api, str]] = {
    "chat_completions": "/chat/completions",
    "responses": "/chat/completions",
    "messages": "/chat/completions",
    "completions": "/completions",
    "embeddings": "/embeddings",
}
JSON = "application/json"
SHORTEST_SECRET = 8
"""Characters; what is shorter is none, and may well stand in an error for itself."""
_WITH_USAGE = msgspec.Raw(b'{"include_usage":true}')


class OpenAICompatible:
    """Nothing of the caller's own headers is passed on, but all of its request's fields."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()

    def outgoing(self, order: Order, endpoint: Endpoint, model: str) -> Outgoing:
        brand = brand_of(endpoint)
        headers = {
            "content-type": JSON,
            "accept": MEDIA_TYPE if order.streamed else JSON,
            "accept-encoding": "identity",
            REQUEST_ID: order.request_id,
        }
        body = order.words() | {"model": msgspec.Raw(msgspec.json.encode(model))}
        _cap(body, order, brand)
        if order.streamed and brand.usage_on_request:
            body["stream_options"] = _stream_options(body)
        url = endpoint.base_url + brand.prefix + PATHS[order.api]
        return Outgoing(url, headers | dict(endpoint.headers), msgspec.json.encode(body))

    def reader(self, order: Order, endpoint: Endpoint, media_type: str) -> Reader:
        translator = Mending(order.from_chat()) if order.from_chat is not None else None
        secrets = secrets_of(endpoint)
        if media_type == JSON:
            return WholeReader(order, translator=translator, secrets=secrets)
        if media_type != MEDIA_TYPE:
            raise faults.malformed("answered with something that is neither JSON nor an event stream")
        reader = EventReader if order.streamed else GatheringReader
        ends_with_done = brand_of(endpoint).ends_with_done
        return reader(order, translator=translator, ends_with_done=ends_with_done, secrets=secrets)

    def refusal(self, endpoint: Endpoint, status: int, body: bytes | None, retry_after: str | None) -> BackendFault:
        return openai_errors.refusal(status, body, retry_after, now=self._clock.now(), secrets=secrets_of(endpoint))

    def probe(self, endpoint: Endpoint) -> tuple[str, dict[str, str]]:
        return endpoint.base_url + brand_of(endpoint).probe_path, dict(endpoint.headers)


def brand_of(endpoint: Endpoint) -> Brand:
    return BRANDS.get(endpoint.brand, BRANDS["generic"])


def secrets_of(endpoint: Endpoint) -> list[str]:
    """What the backend is told of itself, without a scheme's name: it must not come back to a tenant."""
    bare = (value.removeprefix("Bearer ").strip() for value in endpoint.headers.values())
    return [value for value in bare if len(value) >= SHORTEST_SECRET]


def _cap(body: Body, order: Order, brand: Brand) -> None:
    """The cap in a field that the brand obeys; what the client itself wrote stays, if it is one."""
    if order.output_cap is None:
        return
    fields = brand.cap_fields if order.api != "completions" else ("max_tokens",)
    wanted = brand.cap_field if order.api != "completions" else "max_tokens"
    if not order.clamp_output and any(given(body, field) for field in fields):
        return
    for field in ("max_tokens", "max_completion_tokens"):
        body.pop(field, None)
    body[wanted] = msgspec.Raw(b"%d" % order.output_cap)


def _stream_options(body: Body) -> msgspec.Raw:
    """The client's own with usage asked for: its answer tells it only if the client asks, too."""
    if not given(body, "stream_options"):
        return _WITH_USAGE
    options = decoded(bytes(body["stream_options"]))
    if not isinstance(options, dict):
        return _WITH_USAGE
    return msgspec.Raw(encoded(options | {"include_usage": True}))
