"""An entry made what Redis keeps, and read again: cut, redacted, compressed, sealed. No I/O; long work for threads."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

import msgspec
from backports import zstd

from gateway.datakeys.data_key import DataKey
from gateway.policies.prompt_log import CustomPattern, PromptLogPolicy
from gateway.promptlog.entry import Entry, Facts, Feedback, Kept
from gateway.secret_key import SealBroken

MARGIN: Final = 16 * 1024
"""A body that is cut is redacted so many bytes further, and those are dropped then: what stood across the cut, and so
was no match, must not stay in part."""
MOST_PARSED: Final = 4 * 1024 * 1024
"""Bodies beyond that are cut before they are redacted."""
_NAMES: Final = frozenset(
    (
        *("id", "type", "role", "object", "format", "model", "name", "call_id", "status"),
        *("finish_reason", "stop_reason", "service_tier", "system_fingerprint"),
    )
)
"""Fields of answers whose texts are not what was said."""
LOOP_BYTES: Final = 16 * 1024
"""From so many on, bodies are worked on in a thread."""
_LEVEL: Final = 3
_FACTS: Final = Facts.__struct_fields__
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class Redactor(Protocol):
    def text(self, text: str, /) -> str: ...

    def json(self, body: bytes, /) -> bytes:
        """Every string in it redacted; what is no JSON, as text."""
        ...


MakeRedactor = Callable[[tuple[CustomPattern, ...]], Redactor]


def remembered(make: MakeRedactor) -> MakeRedactor:
    """Patterns take long to compile, and tenants change them seldom."""
    return lru_cache(maxsize=256)(make)


class Packed(msgspec.Struct, frozen=True):
    """An entry as it goes to Redis; empty bytes: no such body."""

    request_id: UUID
    admitted_at: datetime
    end_user: str | None
    metadata: bytes
    request: bytes
    response: bytes


class NotRedacted(Exception):
    """The redactor failed; nothing of the entry may be kept. The message names the fault, without any of the body."""


class Unreadable(Exception):
    """A sealed value does not open, or holds something else."""


def shortened(entry: Entry, policy: PromptLogPolicy) -> Entry:
    """Without what will not be kept, so that it is not held until it is written."""
    if policy.level not in ("redacted", "full"):
        return msgspec.structs.replace(entry, request=b"", response=b"")
    limit = policy.max_body_bytes
    # Of what is redacted so much more that ``_body`` sees that it was cut.
    most = limit if policy.level == "full" else max(limit, MOST_PARSED) + MARGIN
    if len(entry.request) <= most and len(entry.response) <= most:
        return entry
    return msgspec.structs.replace(
        entry,
        request=_cut(entry.request, most),
        response=_cut(entry.response, most),
        request_cut=entry.request_cut or len(entry.request) > most,
        response_cut=entry.response_cut or len(entry.response) > most,
    )


def pack(entry: Entry, policy: PromptLogPolicy, key: DataKey, make_redactor: MakeRedactor) -> Packed:
    """Raises NotRedacted."""
    redactor = make_redactor(policy.patterns) if policy.level == "redacted" else None
    bodies = policy.level in ("redacted", "full")
    limit = policy.max_body_bytes
    request, request_cut = _body(entry.request, redactor, limit) if bodies else (b"", False)
    response, response_cut = (
        _body(entry.response, redactor, limit, texts_cut=entry.response_cut) if bodies else (b"", False)
    )
    told = {name: getattr(entry, name) for name in _FACTS}
    told["request_cut"] |= request_cut
    told["response_cut"] |= response_cut
    kept = Kept(**told, level=policy.level, request_bytes=len(request), response_bytes=len(response))

    def sealed(part: str, body: bytes) -> bytes:
        return key.seal(zstd.compress(body, _LEVEL), _context(entry.tenant_id, entry.request_id, part)) if body else b""

    return Packed(
        entry.request_id,
        entry.admitted_at,
        entry.end_user,
        key.seal(_encoded(kept), _context(entry.tenant_id, entry.request_id, "metadata")),
        sealed("request", request),
        sealed("response", response),
    )


def _encoded(kept: Kept) -> bytes:
    try:
        return _encoder.encode(kept)
    except UnicodeEncodeError:
        # Half a surrogate pair, in what a client calls something.
        told = msgspec.structs.asdict(kept)
        told["tags"] = tuple(map(_clean, kept.tags))
        told |= {name: _clean(value) for name, value in told.items() if isinstance(value, str)}
        return _encoder.encode(Kept(**told))


def _clean(text: str) -> str:
    return text.encode(errors="replace").decode()


def _body(body: bytes, redactor: Redactor | None, limit: int, *, texts_cut: bool = False) -> tuple[bytes, bool]:
    """The body as it is kept, and whether it was cut. ``texts_cut``: some of the texts in it may have been before."""
    if redactor is None:
        return (body, False) if len(body) <= limit else (_cut(body, limit), True)
    try:
        return _redacted(body, redactor, limit, texts_cut=texts_cut)
    except Exception as fault:
        # Its kind alone, for its text might hold some of the body.
        raise NotRedacted(type(fault).__name__) from None


def _redacted(body: bytes, redactor: Redactor, limit: int, *, texts_cut: bool) -> tuple[bytes, bool]:
    if len(body) <= max(limit, MOST_PARSED):
        redacted = redactor.json(body)
        if texts_cut:
            redacted = _without_ends(redacted)
        return (redacted, False) if len(redacted) <= limit else (_cut(redacted, limit), True)
    head = body[: limit + MARGIN].decode(errors="replace")
    # Of this even with much that became shorter: what stood last may have been cut in two.
    redacted = redactor.text(head).encode()
    return _cut(redacted, max(0, min(limit, len(redacted) - MARGIN))), True


def _without_ends(redacted: bytes) -> bytes:
    """Each text in an answer without its last characters: it may have been cut within a match."""
    try:
        return msgspec.json.encode(_shorter(msgspec.json.decode(redacted), ""))
    except (msgspec.DecodeError, RecursionError):
        return _cut(redacted, max(0, len(redacted) - MARGIN))


def _shorter(value: Any, name: str) -> Any:
    if isinstance(value, str):
        return value if name in _NAMES else value[:-MARGIN]
    if isinstance(value, dict):
        return {key: _shorter(each, key) for key, each in value.items()}
    return [_shorter(each, name) for each in value] if isinstance(value, list) else value


def _cut(body: bytes, limit: int) -> bytes:
    """At most ``limit`` bytes, not within a character of UTF-8."""
    while limit > 0 and limit < len(body) and body[limit] & 0xC0 == 0x80:
        limit -= 1
    return body[:limit]


def unpack_metadata(sealed: bytes, key: DataKey, tenant_id: UUID, request_id: UUID) -> Kept:
    """Raises Unreadable."""
    return _decoded(_METADATA, _opened(sealed, key, tenant_id, request_id, "metadata"))


def unpack_body(sealed: bytes, key: DataKey, tenant_id: UUID, request_id: UUID, part: str) -> bytes:
    """``part``: ``request`` or ``response``. Raises Unreadable."""
    try:
        return zstd.decompress(_opened(sealed, key, tenant_id, request_id, part))
    except zstd.ZstdError as fault:
        raise Unreadable(str(fault)) from fault


def pack_feedback(feedback: Feedback, key: DataKey, tenant_id: UUID, request_id: UUID) -> bytes:
    return key.seal(_encoder.encode(feedback), _context(tenant_id, request_id, "feedback"))


def unpack_feedback(sealed: bytes, key: DataKey, tenant_id: UUID, request_id: UUID) -> Feedback:
    """Raises Unreadable."""
    return _decoded(_FEEDBACK, _opened(sealed, key, tenant_id, request_id, "feedback"))


_METADATA: Final = msgspec.msgpack.Decoder(Kept)
_FEEDBACK: Final = msgspec.msgpack.Decoder(Feedback)


def _opened(sealed: bytes, key: DataKey, tenant_id: UUID, request_id: UUID, part: str) -> bytes:
    try:
        return key.unseal(sealed, _context(tenant_id, request_id, part))
    except SealBroken as fault:
        raise Unreadable(str(fault)) from fault


def _decoded(decoder: msgspec.msgpack.Decoder[T], value: bytes) -> T:
    try:
        return decoder.decode(value)
    except (msgspec.DecodeError, ValueError) as fault:
        raise Unreadable(str(fault)) from fault


def _context(tenant_id: UUID, request_id: UUID, part: str) -> bytes:
    return b"prompt log " + part.encode() + tenant_id.bytes + request_id.bytes
