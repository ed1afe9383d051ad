"""End users of tenants: metered and limited by a keyed hash, so that no table or log holds what a client calls them."""

from __future__ import annotations

from uuid import UUID

from gateway.secret_key import SecretKey

HASH_LENGTH = 32


def end_user_hash(secret_key: SecretKey, tenant_id: UUID, given: str) -> str:
    """32 hex digits, alike for one id of one tenant; nobody without the secret key can tell which id it was."""
    # A client may send half a surrogate pair: an id like any other.
    return secret_key.keyed_hash("end-user", tenant_id.bytes, given.encode("utf-8", "surrogatepass"))[:HASH_LENGTH]
