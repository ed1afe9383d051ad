"""What the server process and its engine process tell each other: msgpack arrays over ZeroMQ."""

from __future__ import annotations

from typing import Literal

import msgspec

from worker.engine.plan import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
"""``stop``: a stop token was drawn; ``length``: ``max_tokens`` were; ``abort``: the server asked for it;
``error``: the request never ran."""


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
    """Text that differs between tenants; part of every KV block's name."""


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


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine after a step. ``steps`` and ``preemptions`` count since it started."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    steps: int = 0
    preemptions: int = 0


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    info: EngineInfo


class StepOutputs(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    outputs: list[EngineOutput]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot go on and is about to exit; every open request has failed."""

    message: str


ToEngine = EngineRequest | AbortRequests
FromEngine = Ready | StepOutputs | Failed

to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
encoder = msgspec.msgpack.Encoder()

INPUT_SOCKET = "in"
"""Name of the socket, inside the instance's directory, that the engine binds and the server sends to."""
OUTPUT_SOCKET = "out"
"""Name of the socket that the server binds and the engine sends to."""
