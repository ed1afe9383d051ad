"""Drives a runner with plans, one block table for each cache group, as a scheduler with a prefix cache would."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from worker.engine.plan import NULL_BLOCK, CacheGroup, NewSequence, SamplingParams, Span, StepPlan

if TYPE_CHECKING:
    from worker.execution.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Gives out blocks from scattered places. Blocks that a window has left, or that belong to nobody any more, are the
    next to be given out, so that who reads them reads another sequence's keys."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        last = runner.num_blocks - 1
        self.free: list[int] = torch.randperm(last, generator=torch.Generator().manual_seed(0)).add(1).tolist()
        self.owners: Counter[int] = Counter()
        self.tables: dict[int, list[list[int]]] = {}
        self.given: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.known: dict[int, int] = {}

    def new(self, key: int, tokens: list[int], like: int | None = None, shared: int = 0) -> NewSequence:
        """A sequence; its first ``shared`` tokens (whole blocks) are those of sequence ``like`` and read its blocks."""
        self.known[key], self.computed[key] = len(tokens), shared
        self.given[key] = 0
        self.tables[key] = [[] for _ in self.runner.cache_groups]
        if like is not None:
            count = shared // self.runner.block_size
            for group, theirs, ours in zip(self.runner.cache_groups, self.tables[like], self.tables[key], strict=True):
                first = self._first_seen(group, shared)
                ours.extend(
                    block if index >= first or self._is_sink(group, index) else NULL_BLOCK
                    for index, block in enumerate(theirs[:count])
                )
                needed = [block for index, block in enumerate(ours) if index >= first or self._is_sink(group, index)]
                assert NULL_BLOCK not in needed, "what the hit needs is gone"
                self.owners.update(needed)
        return NewSequence(key, tokens, GREEDY, len(tokens))

    def span(self, key: int, count: int | None = None) -> Span:
        """The next ``count`` known tokens (None: all)."""
        start = self.computed[key]
        count = self.known[key] - start if count is None else count
        needed = -(-(start + count) // self.runner.block_size)
        new = []
        for table in self.tables[key]:
            while len(table) < needed:
                table.append(self.free.pop())
                self.owners[table[-1]] += 1
            new.append(table[self.given[key] :])
        self.given[key] = needed
        self.computed[key] = start + count
        sample = self.computed[key] == self.known[key]
        self.known[key] += sample
        return Span(key, start, count, new if new[0] else [], sample)

    def logits(self, new: list[NewSequence], spans: list[Span], retired: tuple[int, ...] = ()) -> torch.Tensor | None:
        """Run a step; then drop what windows have left."""
        handle = self.runner.forward(StepPlan(0, new, spans, list(retired)))
        self.runner.sample(handle)
        for span in spans:
            for group, table in zip(self.runner.cache_groups, self.tables[span.key], strict=True):
                for index in range(self._first_seen(group, self.computed[span.key])):
                    if not self._is_sink(group, index):
                        self._drop(table, index)
        return handle.logits

    def finish(self, key: int) -> None:
        for table in self.tables.pop(key):
            for index in range(len(table)):
                self._drop(table, index)
        self.runner.forget(key)

    def close(self) -> None:
        for key in list(self.tables):
            self.finish(key)

    def _drop(self, table: list[int], index: int) -> None:
        block, table[index] = table[index], NULL_BLOCK
        if block != NULL_BLOCK:
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)

    def _first_seen(self, group: CacheGroup, computed: int) -> int:
        """The first block with a key that the next token sees, sinks apart."""
        return 0 if group.window is None else max(0, computed - group.window + 1) // self.runner.block_size

    def _is_sink(self, group: CacheGroup, index: int) -> bool:
        return index * self.runner.block_size < group.sinks
