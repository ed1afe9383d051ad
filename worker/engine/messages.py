"""What the server process and its engine process tell each other: msgpack arrays over ZeroMQ."""

from __future__ import annotations

from typing import Literal

import msgspec

from worker.engine.plan import Pooling, SamplingParams, TokenLogprobs
from worker.protocol.kv_events import KVEvent

FinishReason = Literal["stop", "length", "abort", "error"]
"""``stop``: a stop token was drawn, the grammar is complete, or the embedding is made; ``length``: ``max_tokens`` were
drawn, or ``deadline_s`` is over; ``abort``: the server asked for it; ``error``: see ``EngineOutput.error``."""

ErrorKind = Literal["rejected", "queue_timeout", "grammar", "asleep"]
"""Why a request ended with ``error``: it could never run; it waited longer than ``queue_timeout_s``; its grammar could
not be compiled or followed; the engine sleeps and could not wake."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the output must be. ``json_schema``: the schema's JSON text; ``regex``: a regular expression (Rust's
    syntax); ``lark``: a grammar in llguidance's Lark dialect."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="add"):
    """One sequence to generate. A request for several choices is several of these."""

    request_id: str
    """Unique among the requests of this engine that are open."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    """Most tokens to generate; prompt and output together must fit ``EngineInfo.max_model_len``."""
    stop_token_ids: list[int]
    """Drawing one of these ends the sequence; end-of-sequence ids included, unless they are to be ignored."""
    priority: int = 0
    """Scheduling class; lower runs first."""
    salt: str = ""
    """Text that differs between tenants; part of every KV block's name. Requests without one share blocks."""
    tenant: str = ""
    """Who asks, for fairness within a class."""
    weight: float = 1.0
    """The tenant's share beside others'; above 0."""
    grammar: Grammar | None = None
    pooling: Pooling | None = None
    """Make an embedding of the prompt instead of text; ``max_tokens`` is 0 then."""
    queue_timeout_s: float | None = None
    """Longest wait for the first step."""
    deadline_s: float | None = None
    """Longest life, waiting included; what was generated until then stands."""


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End these requests now, in whatever state they are. Unknown and finished ids are ignored."""

    request_ids: list[str]


class EngineOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one request gained: tokens, or a chunk of its prompt.

    Each request gets exactly one output with a ``finish_reason``: its last.
    """

    request_id: str
    token_ids: list[int]
    """New since the last output. A stop token that ended the sequence is the last of them."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """With ``finish_reason`` ``error``: what was wrong, in words for the caller."""
    prefilled: int | None = None
    """In an output without tokens: how many tokens of the prompt are computed so far. It never falls, not even when
    they are computed anew after preemption. With the first token, all are."""
    error_kind: ErrorKind | None = None
    stop_token_id: int | None = None
    """With finish reason ``stop``: which stop token was drawn."""
    cached_tokens: int | None = None
    """In the first output of a request: tokens of the prompt that were found in the cache, device and host together."""
    queued_us: int | None = None
    """In the first output of a request: microseconds from arrival to its first step."""
    compute_us: int = 0
    """Device microseconds times ranks that this request's share of steps took since the last output. Recomputation
    after preemption is not in it."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of ``token_ids``, where asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Where asked for, of the prompt tokens that this output's step covered, the prompt's first token left out."""
    embedding: list[float] | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine turned out to be once its model was loaded."""

    max_model_len: int
    """Most tokens that prompt and output may have together: bounded by the model and by the KV pool."""
    num_blocks: int
    """KV blocks, the null block included."""
    block_size: int
    """Tokens in a block."""
    vocab_size: int
    eos_token_ids: list[int]
    device: str
    hidden_size: int = 0
    """Length of an embedding."""
    model_fingerprint: str = ""
    """Hex SHA-256 that names architecture and weights; the root of block names."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine after a step. What is not a gauge counts since it started."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1; blocks that are merely cached are not."""
    steps: int = 0
    preemptions: int = 0
    step_us: int = 0
    """Time of all steps, from retirement to retirement."""
    overhead_us: int = 0
    """Its part that is nobody's ``compute_us``: recomputation, aborted requests' last steps."""
    computed_tokens: int = 0
    """Tokens that went through the model."""
    cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache; found there: ``cache_hits``, of which ``host_hits`` came from the
    host tier."""
    cache_hits: int = 0
    host_hits: int = 0
    cached_blocks: int = 0
    """Gauge: blocks that are free but still hold a named content."""
    waiting_for_kv: int = 0
    """Gauge: requests whose blocks are on their way from another tier; inside ``waiting``."""
    sleeping: int = 0
    """Gauge: 0 awake, else the level of ``Sleep``."""


class Control(msgspec.Struct, frozen=True, array_like=True, tag="control"):
    """Ask the engine for something other than tokens; it answers with ``ControlDone``.

    ``sleep`` (``level`` 1: weights to the host, 2: weights dropped; refused while requests are open), ``wake``, and
    ``reset_cache`` (forget every cached block that is not in use). An engine that can't wake, because the weights' file
    is gone or memory is short, sleeps on and says so; it tries again when it is asked again.
    """

    id: int
    action: Literal["sleep", "wake", "reset_cache"]
    level: int = 1


class ControlDone(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    id: int
    error: str | None = None


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, tag="kv"):
    """Changes of the prefix cache, in order; sent only if ``EngineConfig.kv_events``."""

    events: list[KVEvent]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    info: EngineInfo


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    outputs: list[EngineOutput]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot go on and is about to exit; every open request has failed."""

    message: str


ToEngine = EngineRequest | AbortRequests | Control
FromEngine = Ready | StepOutputs | ControlDone | KVEventBatch | Failed

to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
encoder = msgspec.msgpack.Encoder()

INPUT_SOCKET = "in"
"""Name of the socket, inside the instance's directory, that the engine binds and the server sends to."""
OUTPUT_SOCKET = "out"
"""Name of the socket that the server binds and the engine sends to."""
