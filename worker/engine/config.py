"""What an engine process needs to know before it starts."""

from __future__ import annotations

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sent to the engine process as JSON. Sizes are bytes, unless the name says tokens."""

    model_path: str
    """A GGUF file, or a Hugging Face folder with ``config.json`` and ``.safetensors`` files."""
    device: str = "auto"
    """``auto``, ``cpu`` or ``cuda``."""
    threads: int | None = None
    """Threads of one operation on CPU; None: one for each core this process may use."""
    block_size: int | None = None
    """Tokens in a KV block: a multiple of 16; None: what suits the device."""
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
    max_prefill_per_request: int | None = None
    """Most prompt tokens of one request in a step; None: the budget. In either case a prompt of over half a budget lets
    shorter ones of its tenant go before it in each step, up to half of what it could have, and its tenant's further
    long prompts go behind all of these."""
    prefix_caching: bool = True
    host_kv_bytes: int = 0
    """Size of the host tier of the KV cache; 0: none."""
    kv_events: bool = False
    """Whether the changes of the prefix cache are told to the server."""
    queue_timeout_s: float | None = None
    """Longest wait for a first step of requests that name no time of their own; None: no limit."""
    deadline_s: float | None = None
    """Longest life of requests that name no time of their own; None: no limit."""
    fair: bool = True
    """Whether tenants share by weight within a class; else first come, first served."""
    overlap: bool = False
    """Whether a step is planned and submitted before the tokens of the one before it are read."""
    check_every_step: bool = False
    """Verify after each step that every block is accounted for; for tests."""
    attention_window: int | None = None
    """Make full-attention layers see the last so many tokens and ``attention_sinks`` only. For contexts that would not
    fit otherwise: it changes the answers."""
    attention_sinks: int = 0
