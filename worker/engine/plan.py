"""What the scheduler tells every rank to do in one step, and what comes back. Pure data: no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NULL_BLOCK = 0
"""Block id that no sequence owns; padding, and what a window has left behind, point at it."""

Pooling = Literal["mean", "last"]
"""How a sequence becomes one vector: the mean of its tokens' final hidden states, or the last token's."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one sequence's next token is drawn.

    temperature 0 is greedy. ``seed`` is always set (drawn at admission when the client gave none): a draw is keyed
    by (seed, choice, absolute position), so it does not depend on batch, chunking or preemption. The order is: raw
    logits (``logprobs`` are of these), ``allowed_token_ids``, grammar mask, ``logit_bias``, ``min_tokens``, penalties,
    temperature, ``top_k``, ``top_p``, ``min_p``.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    top_k: int = 0
    """Only so many of the likeliest; 0: all."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al., 2019)."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens in the output, for each time they stand there."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    allowed_token_ids: list[int] | None = None
    min_tokens: int = 0
    """While the output has fewer tokens, no token of ``stop_token_ids`` can be drawn."""
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    """With each drawn token its log-probability, and those of so many of the likeliest; None: nothing of this."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""

    @property
    def is_plain(self) -> bool:
        """Whether only temperature, top_p and the seed matter."""
        return self == SamplingParams(self.temperature, self.top_p, self.seed, self.choice)


class CacheGroup(msgspec.Struct, frozen=True):
    """Layers whose KV is kept alike: one block table a group. All groups' blocks come from one pool of equal pages."""

    window: int | None = None
    """A token attends to itself and the ``window - 1`` tokens before it; None: to all."""
    sinks: int = 0
    """So many tokens at the beginning stay visible too (Xiao et al., 2024). A multiple of the block size."""


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that the runner does not hold: first scheduled, or resumed after preemption."""

    key: int
    """Small integer that names the sequence between scheduler and runner; never reused while in flight."""
    token_ids: list[int]
    """Every token known so far: the prompt, and after preemption what was generated too."""
    sampling: SamplingParams
    num_prompt: int = 0
    """How many of ``token_ids`` are prompt; the others are output, for penalties and ``min_tokens``."""
    pooling: Pooling | None = None
    """For an embedding: no token is ever drawn, the vector comes with the step that reaches the last token."""


class Span(msgspec.Struct, frozen=True):
    """One sequence's share of a step: compute tokens ``start`` to ``start + count``.

    In each cache group, the KV of position ``p`` lives in block ``blocks[p // block_size]`` at slot ``p % block_size``;
    ``new_block_ids`` (empty, or one list for each group) extend the sequence's block tables before the step runs. They
    may be NULL_BLOCK where a window has left a block behind already. The first span of a new sequence may start above
    0: what comes before is in the cache.
    """

    key: int
    start: int
    count: int
    new_block_ids: list[list[int]]
    sample: bool
    """Whether the span reaches the last known token, so that the step draws the next one. The runner appends that
    token to the sequence itself: the next span may begin there without anyone sending it, and before anyone read it."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step. ``spans`` holds decodes (count 1, sample) first, then prefill chunks."""

    step: int
    new: list[NewSequence]
    spans: list[Span]
    retired: list[int]
    """Keys to forget before anything else: finished, aborted or preempted since the last plan."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities of the raw logits at one position: before penalties, bias, masks and temperature."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest."""
    top_ids: list[int]
    top_logprobs: list[float]


class StepResult(msgspec.Struct, frozen=True):
    """What one step gave."""

    tokens: list[int]
    """The drawn token of each span with ``sample``, in the order of the plan's spans."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By sequence key: of the drawn token, where asked for."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """By sequence key, where asked for: of tokens ``start + 1`` to ``start + count`` of its span, if of the prompt."""
    embeddings: dict[int, list[float]] = {}
    """By sequence key: of sequences with ``pooling`` whose span reached the last token."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens a grammar allows. ``rows`` index the spans with ``sample``, in the plan's order."""

    rows: list[int]
    bits: npt.NDArray[np.int32]
    """``[len(rows), ceil(vocab / 32)]``, little-endian bits: bit ``t % 32`` of word ``t // 32`` is token ``t``."""


class Tier(IntEnum):
    """Where KV blocks can be."""

    DEVICE = 0
    HOST = 1


class Transfer(msgspec.Struct, frozen=True):
    """Copy blocks from one tier to another: ``pairs`` of (source block, destination block)."""

    id: int
    source: Tier
    destination: Tier
    pairs: list[tuple[int, int]]


class TransferResult(msgspec.Struct, frozen=True):
    """A transfer that has ended. ``failed``: destination blocks whose content must not be used."""

    id: int
    failed: list[int] = []


class Handle(Protocol):
    """A step whose forward pass was submitted; opaque to the engine."""


class Drawn(Protocol):
    """A step whose draws were submitted."""

    def result(self) -> StepResult:
        """Wait for the step and read what it gave."""
        ...


class Runner(Protocol):
    """What executes plans: one device or many ranks. Calls are obeyed in the order in which they are made."""

    def forward(self, plan: StepPlan) -> Handle:
        """Submit the model's pass over the plan's spans, which writes their KV."""
        ...

    def sample(self, handle: Handle, masks: TokenMasks | None = None) -> Drawn:
        """Submit the draws of the spans with ``sample``; each token is appended to its sequence on the device."""
        ...

    def transfer(self, transfer: Transfer) -> None:
        """Begin to copy blocks. Steps submitted before it have been run when it reads or writes device blocks."""
        ...

    def transfers_done(self) -> Sequence[TransferResult]:
        """The transfers that have ended since the last call, without waiting."""
        ...

    def sleep(self, level: int) -> None:
        """Give up the KV pool, and the weights: level 1 keeps a copy of them on the host, level 2 drops them. From 1 to
        2 a runner need not wake. Raises ``OSError``, ``ValueError`` or ``MemoryError`` with nothing given up."""
        ...

    def wake(self) -> None:
        """Undo ``sleep``. The KV pool comes back empty. Raises ``OSError``, ``ValueError`` or ``MemoryError``, and
        sleeps on, if the weights can't be had or there is no room for them now."""
        ...
