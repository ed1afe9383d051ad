"""What runs the scheduler's plans: the model on one device, its KV pool and the rows of its sequences."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kernels.attention_plan import plan_attention
from kernels.cache import PagedCache
from kernels.device import compute_dtype, release_memory, select_device
from kernels.readback import Readback
from worker.engine.config import EngineConfig
from worker.engine.plan import (
    NULL_BLOCK,
    CacheGroup,
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
from worker.execution.kv_transfer import HostPages
from worker.execution.memory import block_size_of, pool_sizes
from worker.execution.model_source import ModelSource, max_model_len
from worker.execution.pooling import Pooler
from worker.execution.prompt_logprobs import PromptScorer, PromptScores
from worker.execution.sampler import Draws, Sampler
from worker.model.decoder import Decoder
from worker.model.layers import GroupContext, StepContext

_WARM_UP_KEY: Final = -1
_ASLEEP: Final = "the runner sleeps; wake it before the next step or transfer"


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A step whose forward pass was submitted. ``logits`` ``[spans that sample, vocab]``; None if none does.
    By sequence key: ``vectors``, the embeddings that it completes, and what it found out about prompts."""

    batch: Batch
    logits: torch.Tensor | None
    vectors: dict[int, Readback]
    prompt_scores: dict[int, PromptScores]


@dataclass(frozen=True, slots=True)
class StepDrawn:
    """A step whose draws were submitted. ``tokens`` int64 ``[spans that sample]`` and ``draws``: None if none does."""

    handle: StepHandle
    tokens: Readback | None
    draws: Draws | None

    def result(self) -> StepResult:
        """Wait for the step and read what it gave."""
        held = self.handle.batch.sampled_sequences
        return StepResult(
            [] if self.tokens is None else self.tokens.read().tolist(),
            {} if self.draws is None else {held[row].key: found for row, found in self.draws.logprobs().items()},
            {key: scores.read() for key, scores in self.handle.prompt_scores.items()},
            {key: vector.read().tolist() for key, vector in self.handle.vectors.items()},
        )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What sleep gives up."""

    model: Decoder
    cache: PagedCache
    sequences: SequenceTable
    sampler: Sampler
    pooler: Pooler
    scorer: PromptScorer


class ModelRunner:
    """Implements ``worker.engine.plan.Runner`` on one device.

    ``num_blocks`` counts block 0, the null block, which must never be handed out; ``num_host_blocks`` counts those of
    the host tier, all of which may be. ``max_model_len`` is the most tokens of one sequence; ``eos_token_ids`` end
    generation; ``hidden_size`` is the length of an embedding. Raises ``ValueError`` (``GGUFError`` for the file) if the
    model can't be loaded or a pool can't hold a block. A pool smaller than ``max_model_len`` is no error here.

    A step owns what it reads and gives: handles and draws may be read late, when later steps have been submitted.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.device = select_device(config.device)
        if self.device.type == "cpu":
            threads.apply(config.threads)
        self.block_size = block_size_of(config, self.device)
        self._source = ModelSource(config, self.device, self.block_size)
        with torch.inference_mode():
            model = self._source.build()
            shape = model.config
            self.max_model_len = max_model_len(config, shape)
            self.vocab_size = shape.vocab_size
            self.hidden_size = shape.hidden_size
            self.eos_token_ids = shape.eos_token_ids
            self.cache_groups: Sequence[CacheGroup] = model.layout.groups
            self.model_fingerprint = self._source.fingerprint
            sizes = pool_sizes(config, self.device, model, self.block_size, self.max_model_len)
            self.num_blocks, self.num_host_blocks = sizes
            loaded = self._load(model)
        self._loaded: _Loaded | None = loaded
        self._host = HostPages(loaded.cache.pages, self.num_host_blocks) if self.num_host_blocks else None
        self._warm_up(config.max_batched_tokens)

    def _load(self, model: Decoder) -> _Loaded:
        shape = model.config
        return _Loaded(
            model,
            PagedCache(
                self.num_blocks,
                model.layout.layers_per_page,
                shape.num_kv_heads,
                self.block_size,
                shape.head_dim,
                compute_dtype(self.device),
                self.device,
            ),
            SequenceTable(self.max_model_len, self.block_size, self.device, len(self.cache_groups)),
            Sampler(self.vocab_size, self.device, self.eos_token_ids),
            Pooler(),
            PromptScorer(),
        )

    @property
    def _awake(self) -> _Loaded:
        if self._loaded is None:
            raise RuntimeError(_ASLEEP)
        return self._loaded

    @torch.inference_mode()
    def _warm_up(self, max_batched_tokens: int) -> None:
        """Run a prefill and a decode into the null block, so that the first request finds compiled primitives."""
        count = min(max_batched_tokens, self.max_model_len - 1)
        if count < 1:
            return
        blocks = [[NULL_BLOCK] * (-(-(count + 1) // self.block_size))] * len(self.cache_groups)
        new = NewSequence(_WARM_UP_KEY, [0] * count, SamplingParams(temperature=0.0), count)
        prefill = Span(_WARM_UP_KEY, 0, count, blocks, True)
        decode = Span(_WARM_UP_KEY, count, 1, [], True)
        self.sample(self.forward(StepPlan(0, [new], [prefill], [])))
        self.sample(self.forward(StepPlan(0, [], [decode], [])))
        self.forget(_WARM_UP_KEY)
        self._awake.cache.pages[NULL_BLOCK].zero_()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> StepHandle:
        """Run the model over the plan's spans, writing their KV. Raises ``ValueError`` for a plan it can't obey."""
        loaded = self._awake
        model, cache = loaded.model, loaded.cache
        batch = loaded.sequences.prepare(plan)
        context = StepContext(
            cache=cache,
            groups=[
                GroupContext(
                    plan_attention(cache, batch.query_start, batch.seq_lens, tables, group.window, group.sinks),
                    cache.slot_index(slots),
                )
                for group, tables, slots in zip(self.cache_groups, batch.block_tables, batch.slots, strict=True)
            ],
            rotations=model.rotations.index_select(0, batch.positions),
        )
        hidden = model.forward(batch.token_ids, context)
        logits = model.logits(hidden.index_select(0, batch.sampled)) if batch.draws else None
        pooler, scorer = loaded.pooler, loaded.scorer
        pooler.follow(plan.new, plan.retired)
        scorer.follow(plan.new, plan.retired)
        return StepHandle(
            batch,
            logits,
            pooler.pool(plan, batch.query_start, hidden, model) if pooler else {},
            scorer.score(plan, batch.query_start, hidden, model) if scorer else {},
        )

    @torch.inference_mode()
    def sample(self, handle: Handle, masks: TokenMasks | None = None) -> StepDrawn:
        """Draw the next token of each span that samples, and append it to its sequence."""
        if not isinstance(handle, StepHandle):
            raise TypeError(f"not a handle of this runner: {handle!r}")
        if handle.logits is None:
            return StepDrawn(handle, None, None)
        batch = handle.batch
        loaded = self._awake
        sequences = loaded.sequences
        draws = loaded.sampler.draw(handle.logits, batch.draws, sequences.token_ids, masks)
        sequences.append(batch.sampled_rows, batch.sampled_positions, draws.tokens)
        return StepDrawn(handle, Readback(draws.tokens), draws)

    def transfer(self, transfer: Transfer) -> None:
        """Begin to copy blocks between the pool and the host tier. Raises ``ValueError`` if there is no host tier."""
        if self._host is None:
            raise ValueError("there is no host tier; give host_kv_bytes")
        if self._loaded is None:
            raise RuntimeError(_ASLEEP)
        self._host.submit(transfer)

    def transfers_done(self) -> list[TransferResult]:
        """The transfers that have ended since the last call, without waiting."""
        return [] if self._host is None else self._host.done()

    def sleep(self, level: int) -> None:
        """Give up all KV, the host tier's too, and every sequence; 1: keep the weights in host memory (on CPU they stay
        where they are), 2: drop them. Waits for transfers. A runner that sleeps may sleep deeper.

        Raises ``ValueError`` for another level, and, with nothing given up, what reading the weights may raise.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level is {level}; it must be 1 (keep the weights in host memory) or 2 (drop them)")
        if self._loaded is not None and level == 1:
            self._source.keep(self._loaded.model)
        elif level == 2:
            self._source.drop()
        if self._host is not None:
            self._host.detach()
        self._loaded = None
        release_memory(self.device)

    @torch.inference_mode()
    def wake(self) -> None:
        """Load what ``sleep`` gave up, with an empty KV pool. Raises ``ValueError`` or ``OSError``, and sleeps on, if
        the weights' file is gone or another than it was; ``MemoryError`` if there is no room now."""
        if self._loaded is not None:
            return
        try:
            self._restore()
        except Exception as error:
            # What was loaded until then is held by the frames that failed.
            traceback.clear_frames(error.__traceback__)
            release_memory(self.device)
            if isinstance(error, torch.OutOfMemoryError):
                raise MemoryError(str(error)) from None
            raise

    def _restore(self) -> None:
        loaded = self._load(self._source.build())
        if self._host is not None:
            self._host.attach(loaded.cache.pages)
        self._loaded = loaded
        self._source.drop()

    def forget(self, key: int) -> None:
        """Give up a sequence outside of a plan; an unknown key is no fault."""
        loaded = self._awake
        loaded.sequences.forget(key)
        loaded.pooler.follow([], [key])
        loaded.scorer.follow([], [key])
