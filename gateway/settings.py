"""Settings of one gateway process: environment first, then a TOML file, then defaults that suit local use.

Each field is read from ``PENSTOCK_<FIELD>`` (``DATABASE_URL``, ``REDIS_URL`` and ``CACHE_REDIS_URL`` bear no prefix)
or from a key of the same name in the TOML file named by ``PENSTOCK_CONFIG``, else ``.penstock/settings.toml`` if it is
there.
No secret has a default.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

LOCAL_CONFIG = Path(".penstock/settings.toml")
_UNPREFIXED = {"database_url": "DATABASE_URL", "redis_url": "REDIS_URL", "cache_redis_url": "CACHE_REDIS_URL"}
_REQUIRED = ("database_url", "redis_url")


SECRET_KEY_LENGTH = 32
_TOKEN = re.compile(r"[\x21-\x7e]{16,}")
_LISTS = frozenset(("cors_origins",))
"""Fields whose variable holds several values, with commas between."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_DEFAULT_PORT = re.compile(r"https://.*:443|http://.*:80")
_RANGES = {
    "websocket_idle_s": (0.1, 24 * 3600),
    "port": (1, 65535),
    "responses_retention_days": (0, 3650),
    "max_body_bytes": (1, 1024**3),
    "body_timeout_s": (0.1, 3600),
    # Together well below the minute from which on admit.lua takes an opening for a clock that was set back.
    "redis_timeout_s": (0.01, 10),
    "lease_renewal_s": (0.01, 30),
    "lease_s": (0.1, 300),
    "drain_interval_s": (0.01, 60),
    "principal_cache_s": (0, 300),
    "worker_ttl_s": (2, 60),
    "connect_timeout_s": (0.01, 60),
    "first_byte_timeout_s": (0.1, 3600),
    "idle_timeout_s": (0.1, 3600),
    "probe_interval_s": (0.1, 3600),
    "keepalive_s": (0.1, 3600),
    "drain_s": (0, 3600),
}


class SettingsError(Exception):
    """A setting is missing or wrong; the message names it and says what to set."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    database_url: str
    """Postgres, as ``postgresql://user:password@host:port/name``."""
    redis_url: str
    """Redis for money and coordination, as ``redis://:password@host:port/0``, or a cluster, as
    ``redis+cluster://:password@host:port,host:port``; it must persist and never evict."""
    cache_redis_url: str | None = None
    """Redis for what may be lost: kept answers and the prompt log. One server, which may evict; with the search module
    also answers of the same meaning are found. Without it, ``redis_url``'s serves, if that is no cluster."""
    host: str = "127.0.0.1"
    """Address to listen on; loopback unless told otherwise."""
    port: int = 8080
    fleet_token: str | None = None
    """Secret that workers and gateways share. Without it no worker can register. At least 16 characters."""
    secret_key: str | None = None
    """From which hashes of end users and keys of sealed values are made. At least 32 characters, alike on all replicas;
    a gateway does not start without it. Changed, end users get new hashes and sealed values are lost."""
    master_key: str | None = None
    """Wraps the tenants' own keys, by which prompt log and kept answers are sealed. At least 32 characters, alike on
    all replicas. Without it, one made of ``secret_key`` serves."""
    previous_master_key: str | None = None
    """The one before, while `penstock prompts rewrap` has not wrapped all keys anew."""
    spool_dir: str = ".penstock/spool"
    """Folder for settlements that Redis cannot take; on a disk that survives a restart. Gateways of one host may share
    it."""
    ledger_retention_months: int | None = None
    """Whole months of ledger rows kept beside the running one; the sums stay. None: all."""
    responses_retention_days: int = 30
    """How long answers of the Responses API are kept, sealed, for requests that build upon them. 0: none is kept."""
    max_body_bytes: int = 32 * 1024 * 1024
    """Larger request bodies are refused with 413 before they are read whole."""
    body_timeout_s: float = 60.0
    """Limit for a request's body to arrive whole."""
    ready_needs_backend: bool = False
    """Whether ``/readyz`` waits until some worker has registered. Off behind a load balancer."""
    redis_timeout_s: float = 0.8
    """How long an answer of Redis may take, with connecting, before the request is refused. Below 1 s, so that every
    request has its answer within a second while Redis hangs."""
    lease_s: float = 10.0
    """A request whose gateway is silent for so long is settled as abandoned."""
    lease_renewal_s: float = 2.0
    """How often a gateway renews the leases of its requests and checkpoints their usage."""
    drain_interval_s: float = 0.5
    """How often settled requests are moved from Redis into Postgres."""
    principal_cache_s: float = 5.0
    """Longest time for which a verified key is trusted without asking Postgres again."""
    worker_ttl_s: float = 5.0
    """A worker that sends no heartbeat for so long is gone."""
    connect_timeout_s: float = 2.0
    """Limit for connecting to a backend."""
    first_byte_timeout_s: float = 120.0
    """Limit for a backend's first byte."""
    idle_timeout_s: float = 60.0
    """Longest silence of a backend in mid-stream."""
    probe_interval_s: float = 10.0
    """How often a declared backend is asked whether it lives while no request succeeds there; one that seems dead is
    asked five times as often."""
    keepalive_s: float = 10.0
    """A waiting stream gets a comment line this often, so that proxies do not cut it."""
    metrics_token: str | None = None
    """Bearer token that `/metrics` wants. Without it, only callers on this machine may read it. At least 16
    characters."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call ``/v1`` from a browser, as ``https://app.example.com``, or ``*`` for all; the
    variable has commas between them. None, unless told otherwise."""
    websocket_idle_s: float = 300.0
    """A WebSocket on which nothing is asked for so long is closed."""
    drain_s: float = 8.0
    """On SIGTERM, how long running streams may go on before they are cut."""

    def __post_init__(self) -> None:
        # Imported here: they take long to load, and `penstock --help` needs none of it.
        from gateway.db.engine import psycopg_url
        from gateway.redis_url import ClusterAddress, parse_redis_url

        psycopg_url(self.database_url)
        parse_redis_url(self.redis_url)
        if self.fleet_token is not None and not _TOKEN.fullmatch(self.fleet_token):
            raise ValueError(
                "fleet_token must have at least 16 characters, all visible ASCII; make one with `openssl rand -hex 32`"
            )
        if self.metrics_token is not None and not _TOKEN.fullmatch(self.metrics_token):
            raise ValueError(
                "metrics_token must have at least 16 characters, all visible ASCII; try `openssl rand -hex 32`"
            )
        if self.secret_key is not None and len(self.secret_key) < SECRET_KEY_LENGTH:
            raise ValueError(
                f"secret_key must have at least {SECRET_KEY_LENGTH} characters; make one with `openssl rand -hex 32`"
            )
        for name in ("master_key", "previous_master_key"):
            if (key := getattr(self, name)) is not None and len(key) < SECRET_KEY_LENGTH:
                raise ValueError(
                    f"{name} must have at least {SECRET_KEY_LENGTH} characters; make one with `openssl rand -hex 32`"
                )
        if self.cache_redis_url is not None and isinstance(parse_redis_url(self.cache_redis_url), ClusterAddress):
            raise ValueError("cache_redis_url must name one server, not a cluster")
        if self.ledger_retention_months is not None and self.ledger_retention_months < 1:
            raise ValueError("ledger_retention_months must be at least 1; leave it out to keep all rows")
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:  # NaN is in no range
                raise ValueError(f"{name} must be between {least} and {most}")
        for origin in self.cors_origins:
            if origin != "*" and (not _ORIGIN.fullmatch(origin) or _DEFAULT_PORT.fullmatch(origin)):
                raise ValueError(
                    f"cors_origins has {origin[:100]!r}, which no browser sends as an origin; write it as "
                    "https://app.example.com: in lower case, without a path, a slash at the end or the usual port"
                )
        if self.lease_renewal_s * 2 > self.lease_s:
            raise ValueError("lease_s must be at least twice lease_renewal_s, else leases expire between renewals")


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings. Raises SettingsError with the remedy."""
    environ = os.environ if environ is None else environ
    named = environ.get("PENSTOCK_CONFIG")
    path = Path(named) if named else LOCAL_CONFIG
    values: dict[str, Any] = {}
    if path.is_file():
        try:
            values = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, OSError) as fault:
            raise SettingsError(f"{path}: {fault}") from fault
    elif named:
        raise SettingsError(f"PENSTOCK_CONFIG names {path}, which is not there")
    for field in Settings.__struct_fields__:
        variable = _UNPREFIXED.get(field, f"PENSTOCK_{field.upper()}")
        if environ.get(variable):
            values[field] = _split(environ[variable]) if field in _LISTS else environ[variable]
    for field in _REQUIRED:
        if field not in values:
            variable = _UNPREFIXED[field]
            raise SettingsError(f"{variable} is not set, and {path} does not give {field}; set it, or run `make up`")
    try:
        return msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as fault:
        raise SettingsError(f"settings: {fault}") from fault


def _split(text: str) -> list[str]:
    return [part for each in text.split(",") if (part := each.strip())]
