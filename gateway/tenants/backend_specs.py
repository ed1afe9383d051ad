"""What a declared backend is, as administrators see it and ask for it, and the checks of its values.

Each check raises InvalidField with the remedy, and shows no secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, UnsetType

from gateway.routing.declared import Brand
from gateway.tenants.principal import LONGEST_REQUEST_S
from gateway.tenants.records import AlreadyExists, ConfigurationError, InvalidField, Unknown, check_name

MAX_CONTEXT_LENGTH: Final = 100_000_000
MAX_WEIGHT: Final = 1e6
MAX_PRIORITY: Final = 100
MAX_SECRET: Final = 8192
MAX_HEADERS: Final = 32
MAX_URL: Final = 2000
MAX_CONNECT_S: Final = 60.0
_HOST_AND_PATH = re.compile(r"https?://[^/?#\s]+(?:/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*/*", re.ASCII)
_API_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_SECRET}}}")
_HEADER_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,100}")
_HEADER_VALUE = re.compile(rf"[\x21-\x7e](?:[\x20-\x7e]{{0,{MAX_SECRET - 2}}}[\x21-\x7e])?")
# Hop-by-hop (RFC 9110, 7.6.1).
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
    | {"proxy-authenticate", "proxy-authorization"}
)
# What describes a body that the gateway writes, or a request that it makes.
_GATEWAYS_OWN = frozenset(
    {"host", "expect", "accept", "accept-encoding", "content-length", "content-type", "content-encoding"}
    | {"traceparent", "tracestate", "x-request-id", "cookie", "set-cookie"}
)


class UnknownBackend(Unknown):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no backend {name[:100]!r}; `penstock backends list` shows them")


class BackendExists(AlreadyExists):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is a backend {name!r} already; change it, or choose another name")


@dataclass(frozen=True, slots=True)
class BackendRecord:
    name: str
    pool: str
    brand: str
    base_url: str
    has_api_key: bool
    header_names: tuple[str, ...]
    model: str | None
    context_length: int
    weight: float
    priority: int
    connect_timeout_s: float | None
    first_byte_timeout_s: float | None
    idle_timeout_s: float | None
    enabled: bool
    version: int
    created_at: datetime


class BackendSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    pool: str
    brand: str
    """Whose server it is."""
    base_url: str
    """``https://host``, with the path that comes before the API's own, if there is one."""
    api_key: str | None = None
    headers: dict[str, str] = {}
    """Sent with each request, beside the key."""
    model: str | None = None
    """What to send as the model's name instead of the target's."""
    context_length: int | None = None
    """Most tokens that it takes, prompt and output together; None: what is usual for its brand. If its real limit is
    lower, it refuses too long prompts itself; if it is higher, such a prompt may cost more than was reserved for it."""
    weight: float = 1.0
    """Its share of the requests beside others of its pool and priority; 0: only if no other is left."""
    priority: int = 0
    """Lower first."""
    connect_timeout_s: float | None = None
    """None: as the gateway's settings have it."""
    first_byte_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    enabled: bool = True

    def __repr__(self) -> str:  # it bears secrets
        return f"BackendSpec(name={self.name!r})"


class BackendChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields as in ``BackendSpec``; what is left UNSET stays. ``headers`` takes the place of all that there are."""

    pool: str | UnsetType = UNSET
    brand: str | UnsetType = UNSET
    base_url: str | UnsetType = UNSET
    api_key: str | UnsetType | None = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    model: str | UnsetType | None = UNSET
    context_length: int | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    connect_timeout_s: float | UnsetType | None = UNSET
    first_byte_timeout_s: float | UnsetType | None = UNSET
    idle_timeout_s: float | UnsetType | None = UNSET
    enabled: bool | UnsetType = UNSET

    def __repr__(self) -> str:  # it bears secrets
        return "BackendChange()"


PLAIN_FIELDS: Final = tuple(field for field in BackendChange.__struct_fields__ if field not in ("api_key", "headers"))
"""What may be seen."""


def check_backend(spec: BackendSpec, brands: Mapping[str, Brand]) -> BackendSpec:
    """``spec`` in its normal form, if its values can be."""
    check_name("backend", spec.name)
    if "/" in spec.name:
        raise InvalidField("name", "the name of a backend has no slash; write a dot or a hyphen instead")
    check_name("pool", spec.pool)
    brand = brands.get(spec.brand)
    if brand is not None and brand.family == "penstock":
        raise InvalidField(
            "brand",
            "Penstock's workers are not declared but register themselves: penstock-worker serve --gateway-url ... "
            f"--pool {spec.pool}",
        )
    if brand is None:
        known = ", ".join(sorted(name for name, each in brands.items() if each.family != "penstock"))
        raise InvalidField("brand", f"must be one of {known}; `generic` is any server that speaks OpenAI's API")
    if spec.model is not None:
        check_name("model", spec.model)
    context_length = brand.context_length if spec.context_length is None else spec.context_length
    if not 1 <= context_length <= MAX_CONTEXT_LENGTH:
        raise InvalidField("context_length", f"must be between 1 and {MAX_CONTEXT_LENGTH} tokens")
    if not 0 <= spec.weight <= MAX_WEIGHT:  # NaN is in no range
        raise InvalidField("weight", f"must be between 0 and {MAX_WEIGHT:g}")
    if not 0 <= spec.priority <= MAX_PRIORITY:
        raise InvalidField("priority", f"must be between 0 and {MAX_PRIORITY}")
    for name, most in (
        ("connect_timeout_s", MAX_CONNECT_S),
        ("first_byte_timeout_s", LONGEST_REQUEST_S),
        ("idle_timeout_s", LONGEST_REQUEST_S),
    ):
        value = getattr(spec, name)
        if value is not None and not 0 < value <= most:
            raise InvalidField(name, f"must be above 0 and at most {most:g} seconds")
    if spec.api_key is not None and not _API_KEY.fullmatch(spec.api_key):
        raise InvalidField("api_key", f"must be 1 to {MAX_SECRET} visible ASCII characters, without spaces")
    headers = _check_headers(spec.headers)
    if spec.api_key is not None and (twice := headers.keys() & brand.key_headers("k").keys()):
        raise InvalidField("headers", f"{', '.join(twice)} would be there twice: the API key is sent so; leave it out")
    base_url = _check_url(spec.base_url, brand)
    return msgspec.structs.replace(spec, base_url=base_url, headers=headers, context_length=context_length)


def _check_url(text: str, brand: Brand) -> str:
    """Without slashes at its end, and without what the gateway puts there itself."""
    try:
        parts = urlsplit(text)
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or len(text) > MAX_URL or not text.isascii() or not _HOST_AND_PATH.fullmatch(text):
        raise InvalidField(
            "base_url",
            "must be http(s)://host, with a port and a path if need be, without query and fragment, in ASCII, of "
            f"{MAX_URL} characters at most",
        )
    if "@" in parts.netloc:
        raise InvalidField("base_url", "must hold no user or password; give an API key, or a header")
    if not re.fullmatch(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]", parts.netloc.removesuffix(f":{parts.port}"), re.ASCII):
        raise InvalidField("base_url", "names a host that cannot be; write a name or an address")
    if any(part in (".", "..") for part in parts.path.split("/")):
        raise InvalidField("base_url", "must have no . or .. in its path")
    url = text.rstrip("/")
    return url.removesuffix(brand.prefix).rstrip("/") if brand.prefix and parts.path else url


def _check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    if len(headers) > MAX_HEADERS:
        raise InvalidField("headers", f"are {MAX_HEADERS} at most")
    checked: dict[str, str] = {}
    for given, value in headers.items():
        name = given.lower()
        if not _HEADER_NAME.fullmatch(name):
            raise InvalidField("headers", f"{given[:100]!r} cannot be the name of a header")
        if name in _HOP_BY_HOP | _GATEWAYS_OWN or name.startswith("x-penstock-"):
            raise InvalidField("headers", f"{name} is the gateway's own to set; leave it out")
        if name in checked:
            raise InvalidField("headers", f"{name} is there twice; write it once")
        if not _HEADER_VALUE.fullmatch(value):
            raise InvalidField(
                "headers", f"the value of {name} must be 1 to {MAX_SECRET} printable ASCII characters, trimmed"
            )
        checked[name] = value
    return dict(sorted(checked.items()))


def needs_secret_key() -> ConfigurationError:
    return ConfigurationError("to keep a backend's secrets set PENSTOCK_SECRET_KEY, as the gateways have it")
