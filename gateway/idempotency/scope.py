"""Which requests share one answer: those of one API key, to one path, with one idempotency key and one body."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from gateway.secret_key import SecretKey
from gateway.tenants.principal import Principal
from worker.protocol.errors import ApiError, bad_request

HEADER = "idempotency-key"
MAX_LENGTH = 255
LONG_BODY_BYTES = 1024 * 1024
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_LENGTH}}}")


@dataclass(frozen=True, slots=True)
class Scope:
    """Names one entry in Redis. Nothing of it tells the key or the body to one who lacks the secret key."""

    tenant: str
    shard: str
    hash: str
    body: str
    """Keyed hash of the body's bytes as they came: another spelling of the same JSON is another body."""

    @property
    def keys(self) -> tuple[str, str, str, str]:
        """The Redis keys: the entry, its pieces; and of the tenant's entries which there are, and their sizes."""
        tenant = f"{self.shard}:idempotency:{self.tenant}"
        return f"{tenant}:{self.hash}", f"{tenant}:{self.hash}:pieces", tenant, f"{tenant}:sizes"


def scope_of(secret_key: SecretKey, principal: Principal, path: str, key: str, body: bytes) -> Scope:
    """``path``: of the request's URL; ``key``: a checked idempotency key."""
    parts = (principal.tenant_id.bytes, principal.key_id.encode(), path.encode(), key.encode())
    return Scope(
        tenant=str(principal.tenant_id),
        shard=principal.shard,
        hash=secret_key.keyed_hash("idempotency key", *parts),
        body=secret_key.keyed_hash("idempotency body", principal.tenant_id.bytes, body),
    )


async def find_scope(secret_key: SecretKey, principal: Principal, path: str, key: str, body: bytes) -> Scope:
    """As ``scope_of``, with long bodies hashed beside the event loop."""
    if len(body) > LONG_BODY_BYTES:
        return await asyncio.to_thread(scope_of, secret_key, principal, path, key, body)
    return scope_of(secret_key, principal, path, key, body)


def checked_key(given: str) -> str:
    """An idempotency key as a client sent it. Raises ApiError (400)."""
    if not _KEY.fullmatch(given):
        raise bad_request(
            f"The header '{HEADER}' must have 1 to {MAX_LENGTH} visible ASCII characters, without spaces; a UUID will "
            "do.",
            code="invalid_idempotency_key",
        )
    return given


def reused() -> ApiError:
    return ApiError(
        409,
        f"The header '{HEADER}' was sent before with another body. Use a new key for a new request, or send the very "
        "same bytes again.",
        code="idempotency_key_reused",
        headers={"x-should-retry": "false"},  # OpenAI's SDKs repeat every other 409
    )
