"""How to speak to a kind of backend: what is sent, and how its answer is read.

An adapter serves a family of servers that speak alike; what one brand does in its own way is data (``brands.py``).
Adapters are stateless and cheap. A ``Reader`` reads one attempt's answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from gateway.apis import Api
from gateway.ask import Body, Translator
from gateway.backends.faults import BackendFault
from gateway.billing.usage import TokenUsage
from gateway.routing.route import Endpoint, Target
from worker.protocol.errors import bad_request


class Order(msgspec.Struct, frozen=True):
    """One request for inference, ready to be put into the words of any backend that serves it."""

    request_id: str
    model: str
    """The name the client asked for; it stands in the answer."""
    targets: tuple[Target, ...]
    context_length: int
    """Most tokens that a backend may take, prompt and output together: so many were reserved for."""
    body: Body
    """In the words of ``api``. ``model`` and a missing cap are still to be written in."""
    streamed: bool
    include_usage: bool
    """Whether the answer's stream is to tell usage."""
    output_cap: int | None
    """Most tokens of output of one choice; None: there is no output to be capped."""
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
    prompts: int = 1
    """How many there are; the context holds for each."""
    weight: float = 1.0
    """The tenant's share of a worker beside others'; above 0."""
    api: Api = "chat_completions"
    chat: Body | None = None
    """The request as a chat completion; ``body`` itself where it is one. None: it cannot be told as one."""
    not_chat: str = ""
    """Why it cannot, as a clause that follows "the request"."""
    from_chat: Callable[[], Translator] | None = None
    """Makes what turns a chat completion's answer into ``api``'s; None: ``api`` words its answers so itself."""

    def words(self) -> Body:
        """The request as it is put to servers that speak OpenAI's APIs. Raises ApiError (400) if it cannot be."""
        if self.chat is not None:
            return self.chat
        if self.api in ("responses", "messages"):
            why = self.not_chat or "is no chat"
            raise bad_request(
                f"The request {why}, which the backends of this model cannot be told. Correct it, leave it out, or ask "
                "another model."
            )
        return self.body


class Outgoing(msgspec.Struct, frozen=True):
    """One request to a backend."""

    url: str
    headers: dict[str, str]
    body: bytes

    def __repr__(self) -> str:
        """Without what may be secret."""
        return f"Outgoing(url={self.url!r})"


class Reading(msgspec.Struct):
    """What some bytes of an answer came to."""

    events: list[bytes] = []
    """JSON for the client, in the words of the order's API: of each event, or of the whole answer."""
    usage: TokenUsage | None = None
    """Running totals, if they changed."""
    complete: bool = False
    """The answer came to its good end."""
    fault: BackendFault | None = None
    """What went wrong behind ``events``. Nothing comes after it."""


class Reader(Protocol):
    """Reads the body of one answer, cut anywhere. It raises nothing, whatever the backend sends."""

    def feed(self, chunk: bytes) -> Reading: ...

    def end(self) -> Reading:
        """The body ended as HTTP has it; ``complete`` or ``fault`` says whether that was the answer's end, too."""
        ...


class Backend(Protocol):
    """One family of servers."""

    def outgoing(self, order: Order, endpoint: Endpoint, model: str) -> Outgoing:
        """What to send for ``order``. ``model``: the name by which the backend knows the model.

        Raises ApiError (400) for what this family cannot be asked.
        """
        ...

    def reader(self, order: Order, endpoint: Endpoint, media_type: str) -> Reader:
        """For an answer of status 200. Raises BackendFault if it has the wrong media type."""
        ...

    def refusal(self, endpoint: Endpoint, status: int, body: bytes | None, retry_after: str | None) -> BackendFault:
        """What an answer of another status means. ``body`` is None if it was too long."""
        ...

    def probe(self, endpoint: Endpoint) -> tuple[str, dict[str, str]]:
        """URL and headers of a GET that costs nothing; below 500, the server lives."""
        ...
