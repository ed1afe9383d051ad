"""A request as it came to a door: what the gateway must know of it, and the body that is passed on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol
from uuid import UUID

import msgspec

from gateway.apis import Api
from gateway.tenants.principal import Principal

Body = dict[str, msgspec.Raw]
"""The fields of a request, each still the JSON it came as."""

_NULL = msgspec.Raw(b"null")


class Translator(Protocol):
    """Turns an answer in one API's words into another's. What it cannot read it raises as ``Untranslatable``."""

    def event(self, data: bytes) -> list[bytes]:
        """JSON of one event of a stream, ``[DONE]`` not among them; none or several of the other API's."""
        ...

    def end(self) -> list[bytes]:
        """What the good end of a stream adds."""
        ...

    def whole(self, body: bytes) -> bytes: ...


class Untranslatable(Exception):
    """An answer is not as its API has it; the message says what is wrong with it, as a clause that follows "it"."""


class Ask(msgspec.Struct, frozen=True):
    """What the gateway must know of a request for inference, and the request itself."""

    body: Body
    """In the words of its API, but without what the gateway sees to itself."""
    model: str
    size: int
    """Bytes of the body as it came."""
    stream: bool
    include_usage: bool
    """Whether the answer's stream is to tell usage."""
    choices: int
    """Outputs that may be as long as the cap: choices times prompts."""
    max_output_tokens: int | None
    """Of each choice; None: the client names no cap."""
    end_user: str | None = None
    """Whom the client names as its own user, in its own words: never stored so."""
    tags: tuple[str, ...] = ()
    raw: bytes = b""
    """The body as it came."""
    api: Api = "chat_completions"
    chat: Body | None = None
    """The same request as a chat completion, if it can be told as one."""
    not_chat: str = ""
    """Why it cannot, as a clause that follows "the request"."""
    inputs: tuple[bytes, ...] = ()
    """Of what is no chat, the JSON of each prompt: a text, or a list of token ids. The context holds for each."""
    from_chat: Callable[[], Translator] | None = None
    """Makes what turns a chat completion's answer into this API's; None: it words its answers so itself."""
    prompt_field: str = "messages"
    """Where the prompt stands."""
    cap_field: str = "max_tokens"
    """Where the client names the cap, or would."""


class Call(msgspec.Struct, frozen=True):
    """A request at the door: who asks is known before its body is read."""

    request_id: UUID
    key: str | None
    client_request_id: str | None
    read: Callable[[Principal], Awaitable[Ask]]
    path: str = ""
    """Of the request's URL."""
    idempotency_key: str | None = None
    """As the header has it."""
    traceparent: str | None = None
    """The caller's trace context, as the header has it."""
    cache: str | None = None
    cache_ttl: str | None = None
    log: str | None = None
    """What its headers say of answer cache and prompt log; see ``gateway.memory``."""


def given(body: Body, field: str) -> bool:
    """Whether the request has the field, and it is not null."""
    return body.get(field, _NULL) != _NULL
