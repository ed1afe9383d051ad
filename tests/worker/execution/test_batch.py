"""The arrays of a step, against positions, block tables and slots worked out one token at a time."""

from __future__ import annotations

import random

import pytest
import torch

from worker.engine.plan import NewSequence, SamplingParams, Span, StepPlan
from worker.execution.batch import SequenceTable

BLOCK = 16
LONG, SHORT = 1, 2


def blocks(count: int, seed: int) -> list[int]:
    """Block ids without order or repetition."""
    return random.Random(seed).sample(range(1, 1000), count)


def slots(table: list[int], start: int, count: int) -> list[int]:
    return [table[position // BLOCK] * BLOCK + position % BLOCK for position in range(start, start + count)]


@pytest.mark.parametrize("at_once", [True, False], ids=["blocks at once", "blocks as they are needed"])
def test_tables_and_slots_over_many_blocks(at_once: bool) -> None:
    """One sequence of a dozen blocks in chunks, beside a short one that decodes."""
    table = SequenceTable(400, BLOCK, torch.device("cpu"))
    long_blocks, short_blocks = blocks(13, 1), [1000, 1001]
    long_tokens, short_tokens = list(range(5000, 5200)), list(range(7000, 7009))
    greedy = SamplingParams(temperature=0.0)
    new = [NewSequence(SHORT, short_tokens, greedy)]
    batch = table.prepare(StepPlan(0, new, [Span(SHORT, 0, 9, [short_blocks], True)], []))
    assert batch.block_tables[0].tolist() == [short_blocks[:1]]
    assert batch.slots[0].tolist() == slots(short_blocks, 0, 9)
    table.append(batch.sampled_rows, batch.sampled_positions, torch.tensor([7009]))

    given = 0
    for step, (start, count) in enumerate([(0, 5), (5, 130), (135, 65)]):
        end = start + count
        needed = len(long_blocks) if at_once else -(-end // BLOCK)
        more, given = long_blocks[given:needed], needed
        new = [NewSequence(LONG, long_tokens, greedy)] if step == 0 else []
        decode = Span(SHORT, 9 + step, 1, [], True)
        batch = table.prepare(StepPlan(step, new, [decode, Span(LONG, start, count, [more], end == 200)], []))
        used = -(-end // BLOCK)
        assert batch.seq_lens.tolist() == [10 + step, end]
        assert batch.query_start.tolist() == [0, 1, 1 + count]
        assert batch.block_tables[0].shape == (2, used)
        assert batch.block_tables[0][1].tolist() == long_blocks[:used]
        assert batch.block_tables[0][0].tolist() == [*short_blocks, *[0] * used][:used]
        assert batch.slots[0].tolist() == slots(short_blocks, 9 + step, 1) + slots(long_blocks, start, count)
        assert batch.positions.tolist() == [9 + step, *range(start, end)]
        assert batch.token_ids.tolist() == [7009 + step, *long_tokens[start:end]]
        table.append(batch.sampled_rows[:1], batch.sampled_positions[:1], torch.tensor([7010 + step]))
    assert batch.sampled.tolist() == [0, 65]
    assert batch.sampled_positions == [12, 200]

    # A decode that grows into its thirteenth block, and a row that its next owner finds empty.
    batch = table.prepare(StepPlan(3, [], [Span(LONG, 200, 1, [], True)], [SHORT]))
    assert batch.block_tables[0].tolist() == [long_blocks]
    assert batch.slots[0].tolist() == slots(long_blocks, 200, 1)
    batch = table.prepare(StepPlan(4, [NewSequence(3, [1] * 20, greedy)], [Span(3, 0, 20, [[77, 78]], True)], [LONG]))
    assert batch.block_tables[0].tolist() == [[77, 78]]
    assert batch.slots[0].tolist() == slots([77, 78], 0, 20)


def test_each_cache_group_has_its_own_blocks() -> None:
    table = SequenceTable(100, BLOCK, torch.device("cpu"), num_groups=2)
    greedy = SamplingParams(temperature=0.0)
    new = [NewSequence(LONG, list(range(40)), greedy), NewSequence(SHORT, [1, 2], greedy)]
    # A hit: what comes before token 32 is in the cache, and a window has left the first block behind.
    spans = [Span(SHORT, 0, 2, [[9], [8]], True), Span(LONG, 32, 8, [[3, 4, 5], [0, 7, 6]], True)]
    batch = table.prepare(StepPlan(0, new, spans, []))
    assert [tables.tolist() for tables in batch.block_tables] == [[[9, 0, 0], [3, 4, 5]], [[8, 0, 0], [0, 7, 6]]]
    assert batch.slots[0].tolist() == slots([9], 0, 2) + slots([3, 4, 5], 32, 8)
    assert batch.slots[1].tolist() == slots([8], 0, 2) + slots([0, 7, 6], 32, 8)
    assert [sequence.key for sequence in batch.sampled_sequences] == [SHORT, LONG]
    with pytest.raises(ValueError, match="sequence 2 is given blocks of 1 cache groups; there are 2"):
        table.prepare(StepPlan(1, [], [Span(SHORT, 2, 1, [[10]], True)], []))
    # A group with a window may get its blocks later than the others, but not later than they are written to.
    with pytest.raises(ValueError, match="too few blocks for token 48"):
        table.prepare(StepPlan(2, [], [Span(LONG, 40, 8 + 1, [[10, 11], []], False)], []))
    batch = table.prepare(StepPlan(3, [], [Span(LONG, 40, 9, [[], [12]], False)], []))
    assert [tables.tolist() for tables in batch.block_tables] == [[[3, 4, 5, 10]], [[0, 7, 6, 12]]]
    table.forget(LONG)
    batch = table.prepare(StepPlan(2, [NewSequence(3, [1] * 20, greedy)], [Span(3, 0, 20, [[7, 1], [2, 3]], True)], []))
    assert [tables.tolist() for tables in batch.block_tables] == [[[7, 1]], [[2, 3]]]
