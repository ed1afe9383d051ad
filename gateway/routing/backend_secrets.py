"""The secrets of a declared backend, sealed at rest: its API key, and headers of its own.

What is sealed is bound to the backend's name and to the origin that it may be sent to, so that whoever can write to the
table but has not the secret key cannot have one backend's key sent to another place.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from gateway.secret_key import SealBroken, SecretKey

_PURPOSE = "backend"
_headers_decoder = msgspec.json.Decoder(dict[str, str])


def origin_of(base_url: str) -> str:
    """Scheme, host and port, as a client connects to them."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{parts.hostname}:{port}"


def seal_api_key(secret_key: SecretKey, name: str, base_url: str, api_key: str) -> bytes:
    return secret_key.seal(_PURPOSE, api_key.encode(), context=_context("api_key", name, base_url))


def unseal_api_key(secret_key: SecretKey, name: str, base_url: str, sealed: bytes) -> str:
    """Raises SealBroken."""
    return secret_key.unseal(_PURPOSE, sealed, context=_context("api_key", name, base_url)).decode()


def seal_headers(secret_key: SecretKey, name: str, base_url: str, headers: Mapping[str, str]) -> bytes:
    return secret_key.seal(_PURPOSE, msgspec.json.encode(headers), context=_context("headers", name, base_url))


def unseal_headers(secret_key: SecretKey, name: str, base_url: str, sealed: bytes) -> dict[str, str]:
    """Raises SealBroken."""
    text = secret_key.unseal(_PURPOSE, sealed, context=_context("headers", name, base_url))
    try:
        return _headers_decoder.decode(text)
    except msgspec.DecodeError as fault:
        raise SealBroken("what was sealed are no headers") from fault


def _context(field: str, name: str, base_url: str) -> bytes:
    return f"{field} {name} {origin_of(base_url)}".encode()
