"""A runner without a model, that gives away every fault of the plans it is sent.

It keeps a real paged KV cache: one slot a token, filled through the block tables that the plans describe. The next
token is a function of all the sequence's tokens as they are *read back* through its block table, so that a wrong
block, start or count, a block that two sequences share, or a lost or repeated token changes the text.

Run as a script it is an engine process (``EngineClient.start(command=...)``) whose ``model_path`` is a JSON object
of ToyRunner's arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Sequence

from worker.engine import process
from worker.engine.config import EngineConfig
from worker.engine.plan import NULL_BLOCK, SamplingParams, StepPlan, StepResult, TokenMasks

VOCAB_SIZE = 1000
EOS = 0


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


class Read:
    """Draws that are there already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class _Sequence:
    def __init__(self, token_ids: list[int], sampling: SamplingParams) -> None:
        self.token_ids = list(token_ids)
        self.sampling = sampling
        self.blocks: list[int] = []
        self.written = 0


class ToyRunner:
    """Implements ``worker.engine.plan.Runner``. Checks the plan's own promises too, by assertion."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    device = "toy"

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
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.sequences: dict[int, _Sequence] = {}
        self.steps: list[StepPlan] = []
        self._max_batched_tokens = max_batched_tokens
        self._max_running = max_running
        self._slots = [-1] * (num_blocks * block_size)
        self._keys_seen: set[int] = set()
        self._step_s = step_s
        self._fail_at_token = fail_at_token
        self._die_at_token = die_at_token

    def forward(self, plan: StepPlan) -> list[_Sequence]:
        self.steps.append(plan)
        for key in plan.retired:
            del self.sequences[key]
        for new in plan.new:
            assert new.key not in self._keys_seen, "a key is used again"
            self._keys_seen.add(new.key)
            self.sequences[new.key] = _Sequence(new.token_ids, new.sampling)
        assert plan.spans, "an empty step"
        assert len(plan.spans) <= self._max_running
        assert sum(span.count for span in plan.spans) <= self._max_batched_tokens, "over the token budget"
        assert len({span.key for span in plan.spans}) == len(plan.spans), "a sequence is in the step twice"
        decode = [span.count == 1 and span.sample and span.start > 0 for span in plan.spans]
        assert decode == sorted(decode, reverse=True) or any(s.count == 1 for s in plan.spans[decode.index(False) :])
        sampled = []
        for span in plan.spans:
            sequence = self.sequences[span.key]
            sequence.blocks += span.new_block_ids[0] if span.new_block_ids else []
            end = span.start + span.count
            assert span.count >= 1
            assert span.start == sequence.written, "tokens are left out or computed twice"
            assert end <= len(sequence.token_ids)
            assert span.sample == (end == len(sequence.token_ids)), "a draw too early, or missed"
            for position in range(span.start, end):
                self._slots[self._slot(sequence, position)] = sequence.token_ids[position]
            sequence.written = end
            if span.sample:
                sampled.append(sequence)
        held = [block for sequence in self.sequences.values() for block in sequence.blocks]
        assert len(set(held)) == len(held), "two sequences hold one block"
        assert all(NULL_BLOCK < block < self.num_blocks for block in held), "no such block"
        return sampled

    def sample(self, handle: list[_Sequence], masks: TokenMasks | None = None) -> Read:
        time.sleep(self._step_s)
        drawn = []
        for sequence in handle:
            read = [self._slots[self._slot(sequence, p)] for p in range(sequence.written)]
            token = next_token(read, sequence.sampling)
            sequence.token_ids.append(token)
            drawn.append(token)
            if self._fail_at_token is not None and len(sequence.token_ids) >= self._fail_at_token:
                raise RuntimeError("the toy broke")
            if self._die_at_token is not None and len(sequence.token_ids) >= self._die_at_token:
                os.kill(os.getpid(), 9)
        return Read(StepResult(drawn))

    def _slot(self, sequence: _Sequence, position: int) -> int:
        return sequence.blocks[position // self.block_size] * self.block_size + position % self.block_size


def build(config: EngineConfig) -> ToyRunner:
    return ToyRunner(**json.loads(config.model_path))


if __name__ == "__main__":
    sys.exit(process.run(sys.argv[1], build))
