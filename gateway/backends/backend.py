"""How to speak to a kind of backend: what is sent, and where its usage is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gateway.billing.usage import TokenUsage
from gateway.routing.route import Endpoint


@dataclass(frozen=True, slots=True)
class Order:
    """One chat completion, ready to be sent to any backend of its pool."""

    request_id: str
    pool: str
    model: str
    """The name the client asked for; it stands in the answer."""
    backend_model: str
    context_length: int
    """Most tokens that a backend may take, prompt and output together: so many were reserved for."""
    body: bytes
    """JSON object in the backend's words: its own model name, the output cap written in."""
    streamed: bool
    include_usage: bool
    """Whether the client asked for a last chunk with usage."""
    clamp_output: bool
    """Whether the output cap is the route's default, which a backend may shorten to what fits."""
    salt: str
    tenant: str
    """Opaque and stable: the tenant's id, by which a worker shares its time between tenants."""
    prompt_bytes: int
    """Size of the request; what an estimate of its tokens starts from when a backend tells none."""
    prompt_tokens: int | None = None
    """Counted tokens of the prompt; None: nobody counted them."""
    output_tokens: int | None = None
    """The output cap over all choices: no estimate is above it, as none is above the context. None: nobody set one."""
    weight: float = 1.0
    """The tenant's share of a worker beside others'; above 0."""


class Backend(Protocol):
    """One kind of backend. Adapters are stateless and cheap: they are asked several times a request."""

    def url(self, endpoint: Endpoint) -> str: ...

    def headers(self, order: Order) -> dict[str, str]: ...

    def reading(self, comment: bytes) -> TokenUsage | None:
        """Running totals, if this comment of the stream tells them."""
        ...
