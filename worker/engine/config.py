"""What an engine process needs to know before it starts."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sent to the engine process as JSON. Sizes are bytes, unless the name says tokens."""

    model_path: str
    """A GGUF file."""
    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""
    threads: int | None = None
    """Threads of one operation on CPU; None: one for each core this process may use."""
    block_size: int | None = None
    """Tokens in a KV block: 16, 32, 64 or a multiple of 128; None: what suits the device."""
    kv_cache_bytes: int | None = None
    """Size of the KV pool; None: fitted to the device's free memory."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None: what the model was trained for."""
    max_batched_tokens: int = 512
    """Token budget of one step."""
    max_running: int = 64
    """Most sequences in one step."""
    max_waiting: int = 1024
    """Requests that may be open beyond ``max_running``; one more is refused at once."""
