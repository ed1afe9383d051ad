"""Penalties count what the sequence table holds, however a sequence came to hold it."""

from __future__ import annotations

import torch

from worker.engine.plan import NewSequence, SamplingParams, Span, StepPlan
from worker.execution.batch import Batch, SequenceTable
from worker.execution.sampler import Sampler

CPU = torch.device("cpu")
VOCAB = 50
PROMPT = [3, 4, 5, 3, 6, 7, 8]
PENALISED = SamplingParams(
    temperature=0.8,
    repetition_penalty=1.1,
    presence_penalty=0.4,
    frequency_penalty=0.6,
    seed=5,
    min_tokens=4,
    stop_token_ids=[1, 2],
)


class Sequence:
    """One sequence in a table, beside another that comes and goes; a stand-in for a model makes its logits."""

    def __init__(self, prompt: list[int]) -> None:
        self.table = SequenceTable(100, 16, CPU)
        self.sampler = Sampler(VOCAB, CPU)
        self.prompt = prompt
        self.drawn: list[int] = []
        self.waiting: list[torch.Tensor] = []
        self.key = 0

    def known(self) -> int:
        return len(self.prompt) + len(self.drawn) + len(self.waiting)

    def step(self, plan: StepPlan) -> None:
        batch = self.table.prepare(plan)
        if batch.draws:
            self.waiting.append(self.draw(batch))

    def draw(self, batch: Batch) -> torch.Tensor:
        """Of the sequence's row, which is the batch's last; appended, and not read yet."""
        logits = torch.stack(
            [torch.randn(VOCAB, generator=torch.Generator().manual_seed(row.position)) * 2 for row in batch.draws]
        )
        tokens = self.sampler.draw(logits, batch.draws, self.table.token_ids).tokens
        self.table.append(batch.sampled_rows, batch.sampled_positions, tokens)
        return tokens[-1]

    def prefill(self, chunks: list[int], held: int = 0) -> None:
        """Compute every known token, in chunks, from ``held`` on; the last of them draws."""
        self.key += 1
        tokens = self.prompt + self.drawn
        assert held + sum(chunks) == len(tokens)
        new, blocks, start = [NewSequence(self.key, tokens, PENALISED, len(self.prompt))], [list(range(1, 7))], held
        for count in chunks:
            span = Span(self.key, start, count, [blocks[0]] if start == held else [], start + count == len(tokens))
            self.step(StepPlan(0, new, [span], []))
            new, start = [], start + count

    def decode(self, steps: int, read_late: bool = False) -> None:
        for _ in range(steps):
            self.step(StepPlan(0, [], [Span(self.key, self.known() - 1, 1, [], True)], []))
            if not read_late:
                self.read()
        self.read()

    def read(self) -> None:
        self.drawn += [int(token) for token in self.waiting]
        self.waiting = []

    def preempt(self) -> None:
        """Give the row to another sequence for good, so that it comes back to another row."""
        stranger = NewSequence(1000 + self.key, [9] * 30, PENALISED, 1)
        span = Span(stranger.key, 0, 30, [[7, 8]], False)
        self.table.prepare(StepPlan(0, [stranger], [span], [self.key]))


def drawn_at_once() -> list[int]:
    sequence = Sequence(PROMPT)
    sequence.prefill([len(PROMPT)])
    sequence.read()
    sequence.decode(19)
    return sequence.drawn


def test_the_penalties_matter_here() -> None:
    wanted = drawn_at_once()
    assert len(wanted) == 20
    assert not {1, 2} & set(wanted[:4])
    table = SequenceTable(100, 16, CPU)
    plain = NewSequence(1, PROMPT, SamplingParams(temperature=0.8, seed=5), len(PROMPT))
    batch = table.prepare(StepPlan(0, [plain], [Span(1, 0, len(PROMPT), [[1]], True)], []))
    free = []
    for position in range(len(PROMPT), len(PROMPT) + 20):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(position)) * 2
        rows = [batch.draws[0]._replace(position=position)]
        free.append(int(Sampler(VOCAB, CPU).draw(logits, rows, table.token_ids).tokens[0]))
    assert free != wanted


def test_chunks_do_not_change_what_is_counted() -> None:
    sequence = Sequence(PROMPT)
    sequence.prefill([3, 1, 3])
    sequence.read()
    sequence.decode(19)
    assert sequence.drawn == drawn_at_once()


def test_a_token_that_the_host_has_not_read_is_counted() -> None:
    sequence = Sequence(PROMPT)
    sequence.prefill([len(PROMPT)])
    sequence.decode(19, read_late=True)
    assert sequence.drawn == drawn_at_once()


def test_preemption_and_resumption_do_not_change_what_is_counted() -> None:
    sequence = Sequence(PROMPT)
    sequence.prefill([len(PROMPT)])
    sequence.read()
    for steps in (1, 5, 2):
        sequence.decode(steps)
        sequence.preempt()
        # What the prefix cache still has is not computed again.
        known = sequence.known()
        sequence.prefill([known - 6], held=6)
        sequence.read()
    sequence.decode(20 - len(sequence.drawn))
    assert sequence.drawn == drawn_at_once()
