"""What the scheduler tells every rank to do in one step. Pure data: no tensors, small enough to send."""

from __future__ import annotations

from typing import Protocol

import msgspec

NULL_BLOCK = 0
"""Block id that no sequence owns; padding points at it."""


class SamplingParams(msgspec.Struct, frozen=True):
    """How one sequence's next token is drawn.

    temperature 0 is greedy. ``seed`` is always set (drawn at admission when the client gave none): a draw is keyed
    by (seed, choice, absolute position), so it does not depend on batch, chunking or preemption.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that the runner does not hold: first scheduled, or resumed after preemption."""

    key: int
    """Small integer that names the sequence between scheduler and runner; never reused while in flight."""
    token_ids: list[int]
    """Every token known so far: the prompt, and after preemption what was generated too."""
    sampling: SamplingParams


class Span(msgspec.Struct, frozen=True):
    """One sequence's share of a step: compute tokens ``start`` to ``start + count``.

    The KV of position ``p`` lives in block ``blocks[p // block_size]`` at slot ``p % block_size``; ``new_block_ids``
    extend the sequence's block table before the step runs.
    """

    key: int
    start: int
    count: int
    new_block_ids: list[int]
    sample: bool
    """Whether the span reaches the last known token, so that the step draws the next one. The runner appends that
    token to the sequence itself: the next span may begin there without anyone sending it."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step. ``spans`` holds decodes (count 1, sample) first, then prefill chunks."""

    step: int
    new: list[NewSequence]
    spans: list[Span]
    retired: list[int]
    """Keys to forget before anything else: finished, aborted or preempted since the last plan."""


class Handle(Protocol):
    """A step that was submitted; opaque to the engine."""


class Runner(Protocol):
    """What executes plans: one device or many ranks."""

    def forward(self, plan: StepPlan) -> Handle:
        """Run the model over the plan's spans, writing their KV."""
        ...

    def sample(self, handle: Handle) -> list[int]:
        """The drawn token of each span with ``sample``, in the order of the plan's spans."""
        ...
