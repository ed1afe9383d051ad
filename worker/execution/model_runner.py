"""What runs the scheduler's plans: the model on one device, its KV pool and the rows of its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from kernels.attention import DECODE_CHUNK, plan_attention
from kernels.cache import PagedCache, page_bytes
from kernels.device import compute_dtype, free_memory, kv_block_size, select_device
from worker.engine.config import EngineConfig
from worker.engine.plan import (
    NULL_BLOCK,
    Handle,
    NewSequence,
    SamplingParams,
    Span,
    StepPlan,
    StepResult,
    TokenMasks,
    Transfer,
    TransferResult,
)
from worker.execution import threads
from worker.execution.batch import Batch, SequenceTable
from worker.execution.sampler import draw
from worker.model.layers import StepContext
from worker.model.registry import build_model
from worker.weights.gguf_import import load_decoder

_CPU_POOL_BYTES: Final = 2 << 30
_CPU_POOL_SHARE: Final = 0.25
_CUDA_POOL_SHARE: Final = 0.85
_WARM_UP_KEY: Final = -1


@dataclass(frozen=True, slots=True)
class StepDrawn:
    """A step whose draws were submitted. ``tokens`` int64 ``[spans that sample]``."""

    tokens: torch.Tensor | None

    def result(self) -> StepResult:
        """Wait for the step and read what it gave."""
        return StepResult([] if self.tokens is None else self.tokens.tolist())


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step whose forward pass was submitted. ``logits`` ``[spans that sample, vocab]``; None if none does."""

    batch: Batch
    logits: torch.Tensor | None


class ModelRunner:
    """Implements ``worker.engine.plan.Runner`` on one device.

    ``num_blocks`` counts block 0, the null block, which must never be handed out. ``max_model_len`` is the most tokens
    of one sequence; ``eos_token_ids`` end generation. Raises ``ValueError`` (``GGUFError`` for the file) if the model
    can't be loaded or the pool can't hold a block. A pool smaller than ``max_model_len`` is no error here.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.device = select_device(config.device)
        if self.device.type == "cpu":
            threads.apply(config.threads)
        dtype = compute_dtype(self.device)
        weights = load_decoder(Path(config.model_path))
        shape = weights.config
        self.block_size = kv_block_size(self.device) if config.block_size is None else config.block_size
        if self.block_size not in (16, 32, 64) and (self.block_size < 1 or self.block_size % DECODE_CHUNK):
            raise ValueError(f"block_size is {self.block_size}; it must be 16, 32, 64 or a multiple of {DECODE_CHUNK}")
        if config.max_model_len is not None and not 1 <= config.max_model_len <= shape.context_length:
            raise ValueError(f"max_model_len is {config.max_model_len}; the model takes 1 to {shape.context_length}")
        self.max_model_len = config.max_model_len or shape.context_length
        self.vocab_size = shape.vocab_size
        self.eos_token_ids = shape.eos_token_ids
        with torch.inference_mode():
            self.model = build_model(weights, self.device, dtype, self.max_model_len)
            del weights
            self.num_blocks = self._fit_blocks(config, dtype)
            self._cache = PagedCache(
                self.num_blocks,
                shape.num_layers,
                shape.num_kv_heads,
                self.block_size,
                shape.head_dim,
                dtype,
                self.device,
            )
            self._sequences = SequenceTable(self.max_model_len, self.block_size, self.device)
        self._warm_up(config.max_batched_tokens)

    def _fit_blocks(self, config: EngineConfig, dtype: torch.dtype) -> int:
        shape = self.model.config
        size = page_bytes(shape.num_layers, shape.num_kv_heads, self.block_size, shape.head_dim, dtype)
        blocks_of_longest = -(-self.max_model_len // self.block_size)
        if config.kv_cache_bytes is not None:
            blocks = config.kv_cache_bytes // size
        else:
            free = free_memory(self.device)
            on_cpu = self.device.type == "cpu"
            share = min(_CPU_POOL_BYTES, int(free * _CPU_POOL_SHARE)) if on_cpu else int(free * _CUDA_POOL_SHARE)
            blocks = min(share // size, 1 + config.max_running * blocks_of_longest)
        if blocks < 2:
            raise ValueError(
                f"the KV pool is too small for one block of {self.block_size} tokens beside the null block; give "
                f"kv_cache_bytes of at least {2 * size}, or {(1 + blocks_of_longest) * size} for the longest sequence"
            )
        return int(blocks)

    @torch.inference_mode()
    def _warm_up(self, max_batched_tokens: int) -> None:
        """Run a prefill and a decode into the null block, so that the first request finds compiled primitives."""
        count = min(max_batched_tokens, self.max_model_len - 1)
        blocks = [[NULL_BLOCK] * (-(-(count + 1) // self.block_size))]
        new = NewSequence(_WARM_UP_KEY, [0] * count, SamplingParams(temperature=0.0))
        prefill = Span(_WARM_UP_KEY, 0, count, blocks, True)
        decode = Span(_WARM_UP_KEY, count, 1, [], True)
        self.sample(self.forward(StepPlan(0, [new], [prefill], [])))
        self.sample(self.forward(StepPlan(0, [], [decode], [])))
        self.forget(_WARM_UP_KEY)
        self._cache.pages[NULL_BLOCK].zero_()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> StepHandle:
        """Run the model over the plan's spans, writing their KV. Raises ``ValueError`` for a plan it can't obey."""
        batch = self._sequences.prepare(plan)
        context = StepContext(
            cache=self._cache,
            attention=plan_attention(self._cache, batch.query_start, batch.seq_lens, batch.block_tables),
            slot_index=self._cache.slot_index(batch.slots),
            rotations=self.model.rotations.index_select(0, batch.positions),
        )
        hidden = self.model.forward(batch.token_ids, context)
        if not batch.sampling:
            return StepHandle(batch, None)
        return StepHandle(batch, self.model.logits(hidden.index_select(0, batch.sampled)))

    @torch.inference_mode()
    def sample(self, handle: Handle, masks: TokenMasks | None = None) -> StepDrawn:
        """Draw the next token of each span that samples, and append it to its sequence."""
        if not isinstance(handle, StepHandle):
            raise TypeError(f"not a handle of this runner: {handle!r}")
        if handle.logits is None:
            return StepDrawn(None)
        batch = handle.batch
        tokens = draw(handle.logits, batch.sampling, batch.sampled_positions)
        self._sequences.append(batch.sampled_rows, batch.sampled_positions, tokens)
        return StepDrawn(tokens)

    def transfer(self, transfer: Transfer) -> None:
        raise NotImplementedError("this runner has one tier")

    def transfers_done(self) -> list[TransferResult]:
        return []

    def sleep(self, level: int) -> None:
        raise NotImplementedError("this runner can't sleep")

    def wake(self) -> None:
        raise NotImplementedError("this runner can't sleep")

    def forget(self, key: int) -> None:
        """Give up a sequence outside of a plan; an unknown key is no fault."""
        self._sequences.forget(key)
