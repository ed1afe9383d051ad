"""A request as the cache sees it: whether it can be answered from the cache, and by which names answers are found.

Two requests share an exact name only if nothing that can change the answer differs: whose they are, API, route and
version, and each field of the body as it was written, but for the order of keys, spaces and escapes. They share a
partition, within which meanings are compared, if the last user turn's text alone differs.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import msgspec

from gateway.apis import Api
from gateway.ask import Body
from gateway.cache.keepable import why_not_asked
from gateway.cache.last_turn import without_last_text
from gateway.cache.parts import Guards
from gateway.cache.policy import CacheRules
from gateway.secret_key import SecretKey

MAX_TEXT: Final = 2000
"""Characters of a last turn that is compared by meaning. Embedders read about so far; guards go through all of it."""
_UNASKED: Final = frozenset(("stream", "stream_options", "metadata", "service_tier", "store"))
"""Fields that don't change what the answer says."""
_END_USERS: Final = frozenset(("user", "safety_identifier"))
_decoder = msgspec.json.Decoder(float_hook=lambda text: msgspec.Raw(text.encode()))
_encoder = msgspec.json.Encoder(order="sorted")


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What the pipeline tells the cache of a request."""

    api: Api
    route: str
    version: str
    """Of the model: the route's version and what its targets serve."""
    body: Body
    """In its API's own words, as it came."""
    tenant_id: UUID
    project_id: UUID
    end_user: str | None
    """Keyed hash of the end user that the request names."""
    rules: CacheRules
    streamed: bool = False
    tags: tuple[str, ...] = ()
    """Kept with the answer, for it to be purged by."""
    request_id: str = ""
    """For the log."""

    @property
    def size(self) -> int:
        """Bytes of the body, about."""
        return sum(memoryview(value).nbytes for value in self.body.values())


class Names(msgspec.Struct, frozen=True):
    """By what a question's answers are found."""

    exact: str
    partition: str | None = None
    """None: nothing but the exact tier is good for it."""
    text: str = ""
    """The last user turn's."""


def names_of(question: Question, secret_key: SecretKey, guards: Guards) -> Names | str:
    """Its names; or why neither tier can answer it, in a word. Never raises for what stands in a body."""
    if question.rules.mode == "off":
        return "off"
    try:
        fields = {name: _decoder.decode(value) for name, value in question.body.items()}
        if (reason := why_not_asked(question.api, fields, question.rules, guards)) is not None:
            return reason
        asked = _asked(fields, question.rules)
        scope = _scope(question)
        exact = secret_key.keyed_hash("answer cache exact", *scope, _encoder.encode(asked))
        if question.rules.mode != "semantic":
            return Names(exact)
        split = without_last_text(question.api, asked)
        if split is None or not split[1].strip() or len(split[1]) > MAX_TEXT or not guards.readable(split[1]):
            return Names(exact)
        rest, text = split
        return Names(exact, secret_key.keyed_hash("answer cache partition", *scope, _encoder.encode(rest)), text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return "unreadable"


def _asked(fields: dict[str, Any], rules: CacheRules) -> dict[str, Any]:
    left_out = _UNASKED | _END_USERS if rules.across_end_users else _UNASKED
    return {name: value for name, value in fields.items() if name not in left_out}


def _scope(question: Question) -> tuple[bytes, ...]:
    rules = question.rules
    end_user = b"" if question.end_user is None else b"=" + question.end_user.encode()
    return (
        question.tenant_id.bytes,
        b"*" if rules.across_projects else question.project_id.bytes,
        b"*" if rules.across_end_users else end_user,
        question.api.encode(),
        question.route.encode(),
        question.version.encode(),
    )
