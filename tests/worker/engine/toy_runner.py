"""A runner without a model, that gives away every fault of the plans it is sent.

It keeps a real paged KV cache: one slot a token in each cache group, filled through the block tables that the plans
describe. A slot holds its token and a digest of all tokens up to it, as real keys and values depend on them. The next
token is a function of all the sequence's tokens as they are *read back* through its block tables, so that a wrong
block, start or count, a block wrongly shared, found or loaded, or a lost or repeated token shows: most by assertion,
the rest in the text.

Run as a script it is an engine process (``EngineClient.start(command=...)``) whose ``model_path`` is a JSON object
of ToyRunner's arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from worker.engine import process
from worker.engine.config import EngineConfig
from worker.engine.plan import (
    NULL_BLOCK,
    CacheGroup,
    NewSequence,
    SamplingParams,
    Span,
    StepPlan,
    StepResult,
    Tier,
    TokenLogprobs,
    TokenMasks,
    Transfer,
    TransferResult,
)

VOCAB_SIZE = 1000
EOS = 0

Slot = tuple[int, int]
"""A token, and the digest of the tokens up to it."""


def next_token(tokens: Sequence[int], sampling: SamplingParams, vocab_size: int = VOCAB_SIZE) -> int:
    """What follows ``tokens``. Keyed by seed and choice, as a real draw is."""
    state = zlib.crc32(repr((sampling.seed, sampling.choice, list(tokens))).encode())
    return state % vocab_size


def text_alone(
    prompt: Sequence[int], sampling: SamplingParams, max_tokens: int, stop: Sequence[int] = ()
) -> tuple[list[int], str]:
    """The tokens and the finish reason of a request that has no company: what the engine must give in any."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens, sampling))
        if tokens[-1] in stop:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


def embedding_of(tokens: Sequence[int], pooling: str) -> list[float]:
    """The vector of a prompt."""
    return [float(zlib.crc32(repr((pooling, list(tokens))).encode())), float(len(tokens))]


def logprobs_of(token: int, position: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0 - position, 1, [token] * top, [-1.0 - position] * top)


class _Sequence:
    def __init__(self, new: NewSequence, num_groups: int) -> None:
        self.token_ids = list(new.token_ids)
        self.sampling = new.sampling
        self.num_prompt = new.num_prompt
        self.pooling = new.pooling
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.written: int | None = None
        """Tokens whose KV is there; None before the first span, which may begin after a hit."""
        self.digests: list[int] = []

    def slot(self, position: int) -> Slot:
        """What must stand in the cache."""
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else 0
            self.digests.append(zlib.crc32(b"%d,%d" % (before, self.token_ids[len(self.digests)])))
        return (self.token_ids[position], self.digests[position])


@dataclass
class _Step:
    drawing: list[tuple[int, _Sequence]]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    embeddings: dict[int, list[float]]
    touched: dict[int, set[int]]
    """By block, the keys of those whose tokens the step reads or writes there."""


@dataclass
class _Drawn:
    """Draws that are read later, if at all."""

    runner: ToyRunner
    step: _Step
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    def result(self) -> StepResult:
        assert self.runner.unread[0] is self.step, "steps are read out of order"
        del self.runner.unread[0]
        return StepResult(self.tokens, self.logprobs, self.step.prompt_logprobs, self.step.embeddings)


class ToyRunner:
    """Implements ``worker.engine.engine.ModelRunner``. Checks the plan's own promises too, by assertion."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    device = "toy"
    hidden_size = 2
    model_fingerprint = "toy"

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 1 << 20,
        max_batched_tokens: int = 512,
        max_running: int = 64,
        step_s: float = 0.0,
        fail_at_token: int | None = None,
        die_at_token: int | None = None,
        groups: Sequence[Sequence[int | None]] = ((None, 0),),
        host_blocks: int = 0,
        transfer_polls: int = 1,
        fail_every: int = 0,
        stuck_loads: bool = False,
    ) -> None:
        """``groups``: (window, sinks) of each cache group; ``transfer_polls``: how often it is asked before a transfer
        has ended; every ``fail_every``-th block transferred fails (0: none); with ``stuck_loads`` none comes back."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.cache_groups = [CacheGroup(window, sinks or 0) for window, sinks in groups]
        self.num_host_blocks = host_blocks
        self.sequences: dict[int, _Sequence] = {}
        self.steps: list[StepPlan] = []
        self.unread: list[_Step] = []
        self.asleep = 0
        self.transferred: Counter[Tier] = Counter()
        """Blocks that arrived in a tier."""
        self.failed = 0
        """Blocks that did not."""
        self._max_batched_tokens = max_batched_tokens
        self._max_running = max_running
        self._slots: list[Slot | None] = []
        self._host: list[list[Slot | None]] = [[] for _ in range(host_blocks)]
        self._transfers: list[list] = []
        self._transfer_polls = transfer_polls
        self._fail_every = fail_every
        self._stuck_loads = stuck_loads
        self._blocks_moved = 0
        self._keys_seen: set[int] = set()
        self._step_s = step_s
        self._fail_at_token = fail_at_token
        self._die_at_token = die_at_token
        self.wake()

    def forward(self, plan: StepPlan) -> _Step:
        assert not self.asleep, "a step for a runner that sleeps"
        self.steps.append(plan)
        for key in plan.retired:
            del self.sequences[key]
        for new in plan.new:
            assert new.key not in self._keys_seen, "a key is used again"
            assert 0 < new.num_prompt <= len(new.token_ids)
            self._keys_seen.add(new.key)
            self.sequences[new.key] = _Sequence(new, len(self.cache_groups))
        assert plan.spans, "an empty step"
        assert len(plan.spans) <= self._max_running
        assert sum(span.count for span in plan.spans) <= self._max_batched_tokens, "over the token budget"
        assert len({span.key for span in plan.spans}) == len(plan.spans), "a sequence is in the step twice"
        decode = [span.count == 1 and span.sample and span.start > 0 for span in plan.spans]
        assert decode == sorted(decode, reverse=True) or any(s.count == 1 for s in plan.spans[decode.index(False) :])
        step = _Step([], {}, {}, {})
        for span in plan.spans:
            self._compute(span, step)
        return step

    def sample(self, handle: _Step, masks: TokenMasks | None = None) -> _Drawn:
        time.sleep(self._step_s)
        allowed = {} if masks is None else dict(zip(masks.rows, masks.bits, strict=True))
        drawn = _Drawn(self, handle)
        for row, (key, sequence) in enumerate(handle.drawing):
            token = next_token(self._read_back(sequence), sequence.sampling)
            if row in allowed:
                while not allowed[row][token // 32] >> (token % 32) & 1:
                    token = (token + 1) % self.vocab_size
            if sequence.sampling.logprobs is not None:
                position = len(sequence.token_ids)
                drawn.logprobs[key] = logprobs_of(token, position, sequence.sampling.logprobs)
            sequence.token_ids.append(token)
            drawn.tokens.append(token)
            if self._fail_at_token is not None and len(sequence.token_ids) >= self._fail_at_token:
                raise RuntimeError("the toy broke")
            if self._die_at_token is not None and len(sequence.token_ids) >= self._die_at_token:
                os.kill(os.getpid(), 9)
        self.unread.append(handle)
        return drawn

    def transfer(self, transfer: Transfer) -> None:
        assert not self.asleep
        if transfer.destination is Tier.DEVICE:
            for _, block in transfer.pairs:
                for step in self.unread:
                    assert block not in step.touched, "a block is overwritten that a step in flight uses"
                self._page(block, [None] * self.block_size)  # garbage, until it has arrived
        stuck = self._stuck_loads and transfer.destination is Tier.DEVICE
        self._transfers.append([sys.maxsize if stuck else self._transfer_polls, transfer])

    def transfers_done(self) -> list[TransferResult]:
        done = []
        for entry in self._transfers:
            entry[0] -= 1
        while self._transfers and self._transfers[0][0] <= 0:
            transfer = self._transfers.pop(0)[1]
            failed = []
            for source, destination in transfer.pairs:
                self._blocks_moved += 1
                if self._fail_every and self._blocks_moved % self._fail_every == 0:
                    failed.append(destination)
                elif transfer.source is Tier.HOST:
                    assert self._host[source], "a host block is read that was never filled"
                    self._page(destination, self._host[source])
                else:
                    self._host[destination] = self._page(source)
            self.failed += len(failed)
            self.transferred[transfer.destination] += len(transfer.pairs) - len(failed)
            done.append(TransferResult(transfer.id, failed))
        return done

    def sleep(self, level: int) -> None:
        assert self.asleep < level
        assert not self.unread, "a step is in flight"
        for entry in self._transfers:
            entry[0] = 0
        self.asleep = level

    def wake(self) -> None:
        self.asleep = 0
        self._slots = [None] * (self.num_blocks * self.block_size)

    def _compute(self, span: Span, step: _Step) -> None:
        """Check one span's promises, and write its tokens into the cache."""
        sequence = self.sequences[span.key]
        if span.new_block_ids:
            assert len(span.new_block_ids) == len(self.cache_groups)
            for table, blocks in zip(sequence.tables, span.new_block_ids, strict=True):
                assert all(NULL_BLOCK <= block < self.num_blocks for block in blocks), "no such block"
                table += blocks
        end = span.start + span.count
        assert span.count >= 1
        if sequence.written is None:
            assert span.start < len(sequence.token_ids)
            if sequence.sampling.prompt_logprobs is not None or sequence.pooling == "mean":
                assert span.start == 0, "what the cache held was needed"
            sequence.written = span.start
        assert span.start == sequence.written, "tokens are left out or computed twice"
        assert end <= len(sequence.token_ids)
        draws = end == len(sequence.token_ids) and sequence.pooling is None
        assert span.sample == draws, "a draw too early, or missed"
        for group, table in zip(self.cache_groups, sequence.tables, strict=True):
            for block in self._visible(group, table, span.start, end):
                step.touched.setdefault(block, set()).add(span.key)
            for position in range(span.start, end):
                block = table[position // self.block_size]
                assert block != NULL_BLOCK, "a token is written into the null block"
                self._check_alone(block, span.key)
                self._slots[self._slot(table, position)] = sequence.slot(position)
            self._check(sequence, group, table, span.start)
            self._check(sequence, group, table, end - 1)
        sequence.written = end
        top = sequence.sampling.prompt_logprobs
        if top is not None:
            told = range(span.start + 1, min(end + 1, sequence.num_prompt))
            step.prompt_logprobs[span.key] = [logprobs_of(sequence.token_ids[p], p, top) for p in told]
        if span.sample:
            step.drawing.append((span.key, sequence))
        elif sequence.pooling is not None and end == len(sequence.token_ids):
            step.embeddings[span.key] = embedding_of(self._read_back(sequence), sequence.pooling)

    def _check_alone(self, block: int, key: int) -> None:
        """Nobody else reads or writes a block that is written to."""
        for step in self.unread:
            assert step.touched.get(block, {key}) == {key}, "a block is overwritten that a step in flight uses"
        for other_key, other in self.sequences.items():
            if other_key != key and other.written:
                for group, table in zip(self.cache_groups, other.tables, strict=True):
                    if group.window is None:
                        held = table[: -(-other.written // self.block_size)]
                        assert block not in held, "a block is written to that another sequence holds"

    def _visible(self, group: CacheGroup, table: list[int], start: int, end: int) -> list[int]:
        """The blocks that the tokens from ``start`` to ``end`` attend to, themselves included."""
        last = -(-end // self.block_size)
        if group.window is None:
            return table[:last]
        first = max(0, start - group.window + 1) // self.block_size
        return table[: min(group.sinks // self.block_size, last)] + table[first:last]

    def _check(self, sequence: _Sequence, group: CacheGroup, table: list[int], position: int) -> None:
        """All that the token at ``position`` attends to is there."""
        first = 0 if group.window is None else max(0, position - group.window + 1)
        for p in [*range(min(group.sinks, first)), *range(first, position + 1)]:
            assert self._slots[self._slot(table, p)] == sequence.slot(p), "KV of another text"

    def _read_back(self, sequence: _Sequence) -> list[int]:
        """The sequence's tokens as the cache has them, where it still must have them."""
        tokens = sequence.token_ids.copy()
        assert sequence.written == len(tokens)
        for group, table in zip(self.cache_groups, sequence.tables, strict=True):
            first = 0 if group.window is None else max(0, len(tokens) - group.window)
            for p in [*range(min(group.sinks, first)), *range(first, len(tokens))]:
                slot = self._slots[self._slot(table, p)]
                tokens[p] = -1 if slot is None else slot[0]
        return tokens

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _page(self, block: int, content: list[Slot | None] | None = None) -> list[Slot | None]:
        assert NULL_BLOCK < block < self.num_blocks, "no such block"
        place = slice(block * self.block_size, (block + 1) * self.block_size)
        if content is not None:
            self._slots[place] = content
        return self._slots[place]


def build(config: EngineConfig) -> ToyRunner:
    return ToyRunner(**json.loads(config.model_path))


if __name__ == "__main__":
    sys.exit(process.run(sys.argv[1], build))
