"""How a worker joins a fleet: ``PUT /internal/v1/workers/{worker_id}`` on the gateway, again and again.

Each call carries the fleet token as a bearer token and the whole record, so that a registry that was emptied fills
itself again. The gateway keeps the record for ``ttl_s`` of its answer; ``DELETE`` on the same path withdraws it.
"""

from __future__ import annotations

import msgspec

HEARTBEAT_INTERVAL_S = 1.0


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint of a declared pool, as its worker describes it."""

    worker_id: str
    pool: str
    base_url: str
    """Where the gateway reaches the worker, without a path: ``http://127.0.0.1:8100``."""
    model: str
    """The name the worker serves the model by."""
    context_length: int
    """Most tokens that prompt and output may have together."""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    draining: bool = False
    """Whether it is about to leave: what runs there goes on, and nothing new is sent to it."""
    version: str = ""
    sleep_level: int = 0
    """0: awake; else its engine sleeps, and the next request waits until it is awake."""
    block_size: int = 0
    """Tokens in a block of its KV cache, and ``model_fingerprint``: what block names are made with."""
    model_fingerprint: str = ""
    kv_events: bool = False
    """Whether ``/kv/events`` tells what its prefix cache holds."""


class Registered(msgspec.Struct, frozen=True):
    """The gateway's answer: how long the record lives without another heartbeat, in seconds."""

    ttl_s: float
