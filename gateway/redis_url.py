"""Redis URLs: one server or a cluster; and redis-py clients for either.

``redis://[user:password@]host:port/0``, ``rediss://`` with TLS, ``unix://:password@/path?db=0``, and for a cluster
``redis+cluster://[user:password@]host:port[,host:port...]`` or ``rediss+cluster://``: some of its nodes, from which
the others are learned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:  # redis-py takes long to load, and settings are read by every command
    import redis
    import redis.asyncio

_CLUSTER = "+cluster"


@dataclass(frozen=True, slots=True)
class Address:
    """Where one server is and how to log in."""

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    tls: bool = False
    username: str | None = None
    password: str | None = None
    database: int = 0

    @classmethod
    def parse(cls, url: str) -> Address:
        """Of a URL that names one server. Raises ValueError, without any of the URL in its text."""
        address = parse_redis_url(url)
        if isinstance(address, ClusterAddress):
            raise ValueError("REDIS_URL names a cluster where one server is wanted")
        return address

    def at(self, host: str, port: int) -> Address:
        """Another server of the same cluster."""
        return replace(self, host=host, port=port)

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Nodes of a cluster that may be asked for the others. All share one login."""

    seeds: tuple[Address, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.seeds))


def parse_redis_url(url: str) -> Address | ClusterAddress:
    """Raises ValueError, without any of the URL in its text."""
    try:
        scheme, _, rest = url.partition("://")
        if scheme.endswith(_CLUSTER):
            return _cluster(scheme.removesuffix(_CLUSTER), rest)
        return _server(url)
    except ValueError:
        raise ValueError(
            "REDIS_URL is no Redis URL; write redis://:password@host:6379/0 (or rediss://, or "
            "unix://:password@/path?db=0, or redis+cluster://:password@host:6379,host:6379), and in the password %2F "
            "for /, %23 for #, %3F for ?, %40 for @"
        ) from None


def _server(url: str) -> Address:
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError(parts.scheme)
    if "@" in parts.path + parts.query + parts.fragment:
        raise ValueError("a sign in the password that ends the host's part of a URL")
    username = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    query = parse_qs(parts.query)
    unix = parts.scheme == "unix"
    named = query.get("db", [""])[0] or ("" if unix else parts.path.strip("/"))
    if named and not named.isdecimal():
        raise ValueError(named)
    database = int(named or 0)
    if unix:
        return Address(path=unquote(parts.path), username=username, password=password, database=database)
    return Address(
        host=parts.hostname or "localhost",
        port=parts.port or 6379,
        tls=parts.scheme == "rediss",
        username=username,
        password=password,
        database=database,
    )


def _cluster(scheme: str, rest: str) -> ClusterAddress:
    authority, slash, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    if scheme not in ("redis", "rediss") or not all(hosts.split(",")):
        raise ValueError(scheme)
    seeds = tuple(_server(f"{scheme}://{login}{at}{host}{slash}{path}") for host in hosts.split(","))
    if seeds[0].database:
        raise ValueError("a cluster has one database, 0")
    return ClusterAddress(seeds)


def asyncio_client(
    url: str, *, timeout_s: float, max_connections: int | None = None, **options: Any
) -> redis.asyncio.Redis:
    """A redis-py client that waits at most ``timeout_s`` for a connection and for an answer. Raises ValueError.

    ``max_connections``: callers wait for one another beyond so many (one server only). ``options``: of redis-py's
    constructors. Of a cluster it is a RedisCluster, typed as the Redis whose methods both have: keys of one call or
    script must share a slot, pipelines must be made with ``transaction=False``, and there are no databases.
    """
    import redis.asyncio
    from redis.asyncio.cluster import ClusterNode, RedisCluster
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    chosen: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        # Once, for a connection that a restart of Redis left dead.
        "retry": Retry(NoBackoff(), 1),
    }
    chosen |= options
    address = parse_redis_url(url)
    if isinstance(address, ClusterAddress):
        nodes = [ClusterNode(seed.host, seed.port) for seed in address.seeds]
        cluster: Any = RedisCluster(startup_nodes=nodes, **_cluster_options(address), **chosen)
        return cluster  # type: ignore[no-any-return]
    if max_connections is None:
        return redis.asyncio.Redis.from_url(url, **chosen)
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, max_connections=max_connections, timeout=timeout_s, **chosen
    )
    return redis.asyncio.Redis.from_pool(pool)


def client(url: str, *, timeout_s: float = 5.0, **options: Any) -> redis.Redis:
    """As ``asyncio_client``, blocking. Raises ValueError."""
    import redis.cluster

    chosen: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s} | options
    address = parse_redis_url(url)
    if isinstance(address, ClusterAddress):
        node: Any = redis.cluster.ClusterNode
        nodes = [node(seed.host, seed.port) for seed in address.seeds]
        cluster: Any = redis.cluster.RedisCluster(startup_nodes=nodes, **_cluster_options(address), **chosen)
        return cluster  # type: ignore[no-any-return]
    return redis.Redis.from_url(url, **chosen)


def _cluster_options(address: ClusterAddress) -> dict[str, Any]:
    seed = address.seeds[0]
    return {
        "username": seed.username,
        "password": seed.password,
        "ssl": seed.tls,
        # A cluster that lost some shards still serves the others.
        "require_full_coverage": False,
    }


class NoCacheRedis(Exception):
    """What lives in the cache's Redis is asked for, and there is none."""

    def __init__(self) -> None:
        super().__init__(
            "The prompt log and the answer cache are off here, for REDIS_URL names a cluster. Set CACHE_REDIS_URL to a "
            "Redis server of their own."
        )


def cache_url(cache_redis_url: str | None, redis_url: str) -> str | None:
    """The server for what may be lost; None: there is none. Raises ValueError."""
    if cache_redis_url is not None:
        return cache_redis_url
    return None if isinstance(parse_redis_url(redis_url), ClusterAddress) else redis_url
