from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels import attention_plan
from kernels.attention import paged_attention
from kernels.attention_plan import DECODE_CHUNK, AttentionPlan, plan_attention
from kernels.cache import PagedCache, page_bytes, write_kv

LAYERS, KV_HEADS, GROUP, HEAD_DIM, BLOCK = 2, 2, 3, 16, 16
HEADS = KV_HEADS * GROUP


class Sequences:
    """Sequences with random keys and values in a paged cache; their blocks shuffled, or side by side with gaps."""

    def __init__(
        self,
        lengths: list[int],
        counts: list[int],
        seed: int = 0,
        block: int = BLOCK,
        shuffled: bool = True,
        window: int | None = None,
        sinks: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.counts, self.block = lengths, counts, block
        self.window, self.sinks = window, sinks
        blocks = [-(-length // block) for length in lengths]
        total = sum(blocks) + len(blocks)
        self.cache = PagedCache(total + 3, LAYERS, KV_HEADS, block, HEAD_DIM, torch.float32, torch.device("cpu"))
        self.cache.pages[1:].normal_(generator=generator)
        ids = ((torch.randperm(total, generator=generator) if shuffled else torch.arange(total)) + 1).tolist()
        self.tables = np.zeros((len(lengths), max(blocks)), np.int32)
        for row, count in enumerate(blocks):
            self.tables[row, :count] = [ids.pop(0) for _ in range(count)]
            ids.pop(0)
        self.kv = [torch.randn(n, 2 * KV_HEADS, HEAD_DIM, generator=generator) for n in lengths]
        self.query = [torch.randn(n, HEADS, HEAD_DIM, generator=generator) for n in counts]
        for row, kv in enumerate(self.kv):
            for layer in range(LAYERS):
                write_kv(self.cache, layer, self.cache.slot_index(self.slots(row)), kv + layer)

    def slots(self, row: int) -> torch.Tensor:
        positions = torch.arange(self.lengths[row])
        blocks = torch.from_numpy(self.tables[row].astype(np.int64))[positions // self.block]
        return blocks * self.block + positions % self.block

    def plan(self, rows: list[int]) -> AttentionPlan:
        starts = np.concatenate(([0], np.cumsum([self.counts[row] for row in rows]))).astype(np.int32)
        lengths = np.array([self.lengths[row] for row in rows], np.int32)
        return plan_attention(self.cache, starts, lengths, self.tables[rows], self.window, self.sinks)

    def attend(self, rows: list[int], layer: int) -> list[torch.Tensor]:
        query = torch.cat([self.query[row] for row in rows])
        new = torch.cat([self.kv[row][-self.counts[row] :] + layer for row in rows])
        result = paged_attention(query, new, self.cache, layer, self.plan(rows))
        return list(result.split([self.counts[row] for row in rows]))

    def visible(self, row: int) -> torch.Tensor:
        """Which keys each new token sees: ``[count, length]``."""
        key = torch.arange(self.lengths[row])
        query = key[-self.counts[row] :].unsqueeze(1)
        seen = key <= query
        return seen if self.window is None else seen & ((key > query - self.window) | (key < self.sinks))

    def expected(self, row: int, layer: int) -> torch.Tensor:
        """Softmax attention written out, in float64."""
        query, kv = self.query[row].double(), (self.kv[row] + layer).double()
        count = self.counts[row]
        keys = kv[:, :KV_HEADS].repeat_interleave(GROUP, dim=1)
        values = kv[:, KV_HEADS:].repeat_interleave(GROUP, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * HEAD_DIM**-0.5
        weights = scores.masked_fill(~self.visible(row), float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(count, -1).float()


LENGTHS = [1, 2, 15, 16, 17, 64, DECODE_CHUNK - 1, DECODE_CHUNK, DECODE_CHUNK + 1, 3 * DECODE_CHUNK + 5, 40, 33, 50, 1]
COUNTS = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 40, 7, 49, 1]
"""Decodes, then a whole prompt, a later chunk, a chunk of all but one, and a decode behind them."""


PLACES = [(16, True), (32, True), (48, True), (80, False), (128, True), (128, False), (144, False), (256, False)]
"""Block size, and whether blocks are shuffled."""


SIGHTS = [(None, 0), (1, 0), (20, 0), (130, 0), (10_000, 0), (20, 16), (100, 144), (1, 1)]
"""Windows and sinks."""


@pytest.mark.parametrize(("window", "sinks"), SIGHTS)
@pytest.mark.parametrize(("block", "shuffled"), PLACES)
def test_a_mixed_batch_equals_plain_attention(block: int, shuffled: bool, window: int | None, sinks: int) -> None:
    sequences = Sequences(LENGTHS, COUNTS, block=block, shuffled=shuffled, window=window, sinks=sinks)
    for layer in range(LAYERS):
        for row, result in enumerate(sequences.attend(list(range(len(LENGTHS))), layer)):
            torch.testing.assert_close(result, sequences.expected(row, layer), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (50, 0), (50, 16)])
@pytest.mark.parametrize(("block", "shuffled"), PLACES)
def test_a_sequence_attends_bitwise_alike_alone_and_in_any_batch(
    block: int, shuffled: bool, window: int | None, sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = Sequences(LENGTHS, COUNTS, seed=1, block=block, shuffled=shuffled, window=window, sinks=sinks)
    alone = [sequences.attend([row], 1)[0] for row in range(len(LENGTHS))]
    order = list(range(len(LENGTHS)))
    for group_keys, max_gap, lanes in ((DECODE_CHUNK, 0, 1), (1024, 3, 4), (1 << 20, 100, 0), (1024, 3, 1000)):
        monkeypatch.setattr(attention_plan, "_GROUP_KEYS", group_keys)
        monkeypatch.setattr(attention_plan, "_MAX_GAP", max_gap)
        monkeypatch.setattr(attention_plan, "_LANES_OF_CALL", lanes)
        for rows in (order, order[::-1], order[3:9], [9, 9, 2]):
            for row, result in zip(rows, sequences.attend(rows, 1), strict=True):
                assert torch.equal(result, alone[row]), (group_keys, max_gap, lanes, row)


def test_near_by_blocks_are_read_where_they_lie_and_scattered_ones_copied() -> None:
    def pieces(sequences: Sequences) -> list[tuple[int, int, bool]]:
        (group,) = sequences.plan(list(range(len(sequences.lengths)))).decodes
        return [(piece.begin, piece.end, piece.grain_index is None) for piece in group.pieces]

    dense = Sequences([30] * 12, [1] * 12, block=128, shuffled=False)
    assert pieces(dense) == [(0, 23, True)]  # every other block is a stranger's, and read along
    dense.tables[6:] += 4
    assert pieces(dense) == [(0, 11, True), (11, 22, True)]
    scattered = Sequences([30] * 12, [1] * 12, block=128, shuffled=False)
    scattered.tables[:, 0] = np.arange(1, 13) * 10
    assert pieces(scattered) == [(0, 12, False)]
    small = Sequences([30] * 12, [1] * 12, block=16, shuffled=False)
    assert pieces(small) == [(0, 12, False)]
    # Shared blocks: a run for each owner, not one that ends at each block.
    shared = Sequences([900] * 3, [1] * 3, block=128, shuffled=False)
    shared.tables[1:, :7] = shared.tables[0, :7]
    assert pieces(shared) == [(0, 8, True), (8, 9, True), (9, 10, True), (10, 17, True), (17, 24, True)]


@pytest.mark.parametrize("window", [None, 200])
def test_sequences_that_share_blocks_attend_as_if_they_did_not(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in place: each owner of a block has a lane of its own for it."""
    monkeypatch.setattr(attention_plan, "_LANES_OF_CALL", 0)
    rows = [0, 1, 2, 3, 4]
    sequences = Sequences([900, 800, 769, 100, 60], [1] * 5, block=128, shuffled=False, window=window)
    for row in (1, 2):
        sequences.tables[row, :6] = sequences.tables[0, :6]
        sequences.kv[row][:768] = sequences.kv[0][:768]
    assert all(piece.grain_index is None for group in sequences.plan(rows).decodes for piece in group.pieces)
    for row, result in enumerate(sequences.attend(rows, 0)):
        torch.testing.assert_close(result, sequences.expected(row, 0), rtol=1e-4, atol=1e-5)
        assert torch.equal(result, sequences.attend([row], 0)[0])


@pytest.mark.parametrize(("window", "sinks"), [(40, 0), (700, 16)])
def test_long_blocks_of_which_a_window_sees_the_end(window: int, sinks: int) -> None:
    """The kernel takes keys 512 at a time: the first of them may all be hidden."""
    sequences = Sequences([2000, 1030, 1500], [1, 1, 900], block=1024, shuffled=False, window=window, sinks=sinks)
    for row, result in enumerate(sequences.attend([0, 1, 2], 1)):
        torch.testing.assert_close(result, sequences.expected(row, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("block", "shuffled"), PLACES)
def test_what_lies_behind_a_sequences_end_is_not_read(block: int, shuffled: bool) -> None:
    sequences = Sequences([20, 40], [1, 1], block=block, shuffled=shuffled)
    before = sequences.attend([0, 1], 0)
    # The rest of the last blocks, the null block that pads the tables, and blocks of others.
    own = {int(block) for row in (0, 1) for block in sequences.tables[row] if block}
    for stranger in set(range(sequences.cache.num_blocks)) - own:
        sequences.cache.pages[stranger] = 1e6
    for row, length in enumerate((20, 40)):
        last = sequences.tables[row][(length - 1) // block]
        sequences.cache.pages[last, :, :, :, (length - 1) % block + 1 :] = 1e6
    for old, new in zip(before, sequences.attend([0, 1], 0), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (50, 0), (100, 0), (50, 16), (64, 256)])
@pytest.mark.parametrize(("block", "shuffled"), PLACES)
def test_blocks_that_a_window_has_left_are_not_read(block: int, shuffled: bool, window: int, sinks: int) -> None:
    """They may be the null block, or another sequence's by now."""
    rows = [0, 1, 2, 3]
    sequences = Sequences([700, 350, 500, 340], [1, 1, 9, 100], 2, block, shuffled, window, sinks)
    before = sequences.attend(rows, 0)
    for row, how in zip(rows, ("null", "stranger", "null", "stranger"), strict=True):
        first_seen = max(0, sequences.lengths[row] - sequences.counts[row] + 1 - window)
        for index in range(-(-sinks // block), first_seen // block):
            left = int(sequences.tables[row, index])
            sequences.cache.pages[left] = float("nan")
            if how == "null":
                sequences.tables[row, index] = 0
    for old, new in zip(before, sequences.attend(rows, 0), strict=True):
        assert torch.equal(old, new)


def test_a_page_is_one_contiguous_piece_of_page_bytes() -> None:
    cache = PagedCache(4, LAYERS, KV_HEADS, BLOCK, HEAD_DIM, torch.float32, torch.device("cpu"))
    size = page_bytes(LAYERS, KV_HEADS, BLOCK, HEAD_DIM, torch.float32)
    assert cache.pages[1].is_contiguous()
    assert cache.pages.stride(0) * cache.pages.element_size() == size
    assert cache.pages.nbytes == 4 * size


def test_write_kv_touches_its_own_slot_alone() -> None:
    cache = PagedCache(4, LAYERS, KV_HEADS, BLOCK, HEAD_DIM, torch.float32, torch.device("cpu"))
    kv = torch.arange(2 * KV_HEADS * HEAD_DIM, dtype=torch.float32).view(1, 2 * KV_HEADS, HEAD_DIM) + 1
    write_kv(cache, 1, cache.slot_index(torch.tensor([2 * BLOCK + 5])), kv)
    assert torch.equal(cache.pages[2, 1, :, :, 5].reshape(1, 2 * KV_HEADS, HEAD_DIM), kv)
    assert int(cache.pages.count_nonzero()) == kv.numel()
