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
from gateway.cache.last_turn import user_texts, without_last_text
from gateway.cache.parts import Guards
from gateway.policies.answer_cache import CacheRules
from gateway.secret_key import SecretKey

MAX_TEXT: Final = 1000
"""Characters of a last turn that is compared by meaning. Embedders read about so far; guards go through all of it."""
_UNASKED: Final = frozenset(("stream", "stream_options", "metadata", "service_tier", "store"))
"""Fields that don't change what the answer says."""
_END_USERS: Final = frozenset(("user", "safety_identifier"))
_decoder = msgspec.json.Decoder(float_hook=lambda text: msgspec.Raw(text.encode()))
_encoder = msgspec.json.Encoder(order="sorted")
_packer = msgspec.msgpack.Encoder()


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


class Asked(msgspec.Struct, frozen=True):
    """A question that the exact tier can answer."""

    exact: str
    """Its name."""
    fields: dict[str, Any]
    """What the answer hangs on, decoded."""


class Meaning(msgspec.Struct, frozen=True):
    """What the semantic tier goes by."""

    partition: str
    text: str
    """The last user turn's."""


def read_question(question: Question, secret_key: SecretKey) -> Asked | str:
    """Or why neither tier can answer it, in a word. Never raises for what stands in a body."""
    if question.rules.mode == "off":
        return "off"
    try:
        fields = decoded(question)
        if (reason := why_not_asked(question.api, fields, question.rules)) is not None:
            return reason
        asked = _asked(fields, question.rules)
        exact = secret_key.keyed_hash("answer cache exact", _scope(question), _encoder.encode(asked))
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return "unreadable"
    return Asked(exact, asked)


def meaning_of(question: Question, asked: Asked, secret_key: SecretKey, guards: Guards) -> Meaning | None:
    """None: the exact tier alone is good for it."""
    if question.rules.mode != "semantic" or (split := without_last_text(question.api, asked.fields)) is None:
        return None
    rest, text = split
    if not text.strip() or len(text) > MAX_TEXT or not guards.readable(text):
        return None
    partition = secret_key.keyed_hash("answer cache partition", _scope(question), _encoder.encode(rest))
    return Meaning(partition, text)


def speaks_of_now(question: Question, guards: Guards) -> bool:
    """Whether its user speaks of the present, or may. Takes milliseconds for long prompts."""
    if question.api == "embeddings":
        return False
    texts = user_texts(question.api, decoded(question))
    return texts is None or any(map(guards.speaks_of_now, texts))


def decoded(question: Question) -> dict[str, Any]:
    """Its body, with fractions as they were written. Raises msgspec.DecodeError, RecursionError."""
    return {name: _decoder.decode(value) for name, value in question.body.items()}


def _asked(fields: dict[str, Any], rules: CacheRules) -> dict[str, Any]:
    left_out = _UNASKED | _END_USERS if rules.across_end_users else _UNASKED
    return {name: value for name, value in fields.items() if name not in left_out}


def _scope(question: Question) -> bytes:
    """Whose it is, and whom it asks; packed, which is quicker hashed than each by itself."""
    rules = question.rules
    return _packer.encode(
        (
            question.tenant_id.bytes,
            True if rules.across_projects else question.project_id.bytes,
            True if rules.across_end_users else question.end_user,
            question.api,
            question.route,
            question.version,
        )
    )
