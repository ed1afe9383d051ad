"""Redis as admission uses it: one server or a cluster, asked in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.admission.redis_cluster import ClusterRedis
from gateway.admission.redis_server import PipelinedRedis
from gateway.admission.redis_wire import Argument, RedisClient, RedisError, RedisUnavailable, Script, load_script
from gateway.redis_url import ClusterAddress, parse_redis_url

__all__ = [
    "Argument",
    "ClusterRedis",
    "PipelinedRedis",
    "RedisClient",
    "RedisError",
    "RedisUnavailable",
    "Script",
    "create_redis",
    "load_script",
]


def create_redis(
    url: str,
    *,
    timeout_s: float,
    scripts: Sequence[Script] = (),
    on_connected: Callable[[], None] | None = None,
    name: str = "penstock",
) -> RedisClient:
    """A client for what ``url`` names. It connects with its first call. Raises ValueError.

    ``scripts``: loaded whenever a connection is made. ``on_connected``: called after each connection, so after each
    restart of a server; what was written in its last second may be gone.
    """
    address = parse_redis_url(url)
    if isinstance(address, ClusterAddress):
        return ClusterRedis(address, timeout_s=timeout_s, scripts=scripts, on_connected=on_connected, name=name)
    return PipelinedRedis(address, timeout_s=timeout_s, scripts=scripts, on_connected=on_connected, name=name)
