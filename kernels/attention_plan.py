"""What one step's attention reads: planned once on the host, used by every layer of a cache group.

Sequences with one new token (decodes) are cut into chunks of ``DECODE_CHUNK`` keys; each chunk is attended on its own
and the parts are joined by their log-sum-exp, as in Flash-Decoding (Dao et al., 2023). A sequence within one chunk
takes one as narrow as its length allows. So the products for a sequence depend on its length alone, and its result is
bitwise the same alone and in any batch. Sequences with more new tokens (prefills) are attended one by one over their
exact lengths.

A window cuts both down to the keys that somebody sees: a decode begins at the chunk that holds its window's first key,
and the chunks that hold sinks come before. Chunks stand at multiples of their width from the sequence's beginning, so
that a chunk is a block where blocks are as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kernels.cache import PagedCache

DECODE_CHUNK: Final = 128
"""Keys in one part of a decode."""

_NARROW_STEP: Final = 32
"""Widths of the one chunk of a short sequence: multiples of this."""

_GROUP_KEYS: Final = 1024
"""Most keys gathered at once: the copies of one piece should still be in the core's cache when they are read."""

_MAX_GAP: Final = 3
"""Most strange blocks in a row that are read along with those of the step, rather than begin another call."""

_LANES_OF_CALL: Final = 4
"""Blocks that must be read in place by one call, on average: for fewer, copying them together is cheaper."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Chunks attended by one call, a *lane* each: ``begin`` to ``end`` among the group's lanes."""

    begin: int
    end: int
    first_block: int
    """Lane ``begin + i`` is block ``first_block + i``, read where it lies."""
    grain_index: torch.Tensor | None
    """Else rows of ``PagedCache.grain_rows`` to be copied together, flat; as ``[lanes, 2, KV heads, grains]``."""
    mask: torch.Tensor
    """Added to the scores: ``[lanes, 1, 1, width]``, -inf where the sequence has no key or does not see it."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes attended in chunks of one width."""

    rows: slice | torch.Tensor
    """Where their queries stand in the batch: a slice if side by side, else indices."""
    width: int
    pieces: list[Piece]
    owner: torch.Tensor | None
    """The row of each lane's query within the group; None: lane ``i`` belongs to row ``i``."""
    parts: torch.Tensor | None
    """``[rows, most chunks]``: the lanes to be joined, or ``[rows]``: the one lane of each; None: lane ``i`` is row
    ``i``."""
    absent: torch.Tensor | None
    """``[rows, most chunks, 1, 1]``: -inf where ``parts`` is padding; None: one chunk each."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Several new tokens of one sequence: ``begin`` to ``end`` in the batch."""

    begin: int
    end: int
    grain_index: torch.Tensor | None
    """Rows of ``PagedCache.grain_rows`` as ``[2, KV heads, grains]``; None: the span begins at position 0, so its own
    keys and values are all there is."""
    keys: int
    """How many keys there are: of the last grain copied some may be beyond the sequence's end."""
    mask: torch.Tensor | None
    """Added to the scores: ``[end - begin, keys]``; None: each token sees those before it."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one step's attention needs to know, in the device's own form; made by ``plan_attention``."""

    decodes: list[DecodeGroup]
    prefills: list[Prefill]


@dataclass(frozen=True, slots=True)
class _Visibility:
    """Which keys a token sees: all before it, or the last ``window`` (itself one of them) and the first ``sinks``."""

    window: int | None
    sinks: int


def plan_attention(
    cache: PagedCache,
    query_start: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    block_tables: npt.NDArray[np.int32],
    window: int | None = None,
    sinks: int = 0,
) -> AttentionPlan:
    """Plan one step's attention for layers that share a block table.

    ``query_start`` ``[sequences + 1]``: where each sequence's new tokens begin in the batch. ``seq_lens``
    ``[sequences]``: tokens known to each after this step, its new ones included. ``block_tables`` ``[sequences, most
    blocks]``, padded with block 0. A token sees the ``window`` tokens that end with itself (None: all before it) and
    the first ``sinks`` tokens; blocks in which no new token sees a key are not read, whatever the table says of them.
    """
    seen = _Visibility(window, sinks if window is not None else 0)
    counts = np.diff(query_start)
    prefills = [
        _plan_prefill(cache, int(query_start[row]), int(counts[row]), int(seq_lens[row]), block_tables[row], seen)
        for row in np.flatnonzero(counts != 1)
    ]
    single = np.flatnonzero(counts == 1)
    widths = np.minimum(-(-seq_lens // _NARROW_STEP) * _NARROW_STEP, max(DECODE_CHUNK, cache.block_size))
    decodes = []
    for width in np.unique(widths[single]):
        alike = single[widths[single] == width]
        decodes.append(_plan_decodes(cache, query_start[alike], seq_lens[alike], block_tables[alike], int(width), seen))
    return AttentionPlan(decodes, prefills)


def _plan_decodes(
    cache: PagedCache,
    batch_rows: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    block_tables: npt.NDArray[np.int32],
    width: int,
    seen: _Visibility,
) -> DecodeGroup:
    device = cache.pages.device
    count = len(seq_lens)
    # The first key of each window, and the chunks: those of the sinks, then from the window's first on.
    begins = np.zeros_like(seq_lens) if seen.window is None else np.maximum(seq_lens - seen.window, 0)
    first_chunks = begins // width
    sink_chunks = np.minimum(-(-seen.sinks // width), first_chunks)
    chunks = sink_chunks + -(-seq_lens // width) - first_chunks
    most = int(chunks.max())
    # An item is one chunk of one sequence.
    owner = np.repeat(np.arange(count), chunks)
    first = np.cumsum(chunks) - chunks
    chunk_of_item = np.arange(len(owner)) - first[owner]
    if seen.window is not None:
        chunk_of_item += np.where(chunk_of_item >= sink_chunks[owner], (first_chunks - sink_chunks)[owner], 0)
    ends = np.minimum(seq_lens[owner] - chunk_of_item * width, width)

    lanes = None if cache.block_size < DECODE_CHUNK else _in_place(block_tables[owner, chunk_of_item])
    if lanes is None:
        lane_of_item = np.arange(len(owner))
        lane_count = len(owner)
        grains = _grains_of_items(cache, chunk_of_item * width, width, seq_lens[owner], begins[owner], seen.sinks)
        index = _grain_index(cache, block_tables, owner, *grains).view(lane_count, -1)
        size = max(1, _GROUP_KEYS // width)
        bounds = [(begin, min(begin + size, lane_count), 0) for begin in range(0, lane_count, size)]
    else:
        bounds, lane_of_item = lanes
        index = None
        lane_count = bounds[-1][1]

    # A strange block is attended with some query, and whatever comes of it is left unread.
    owner_of_lane = np.zeros(lane_count, np.int64)
    owner_of_lane[lane_of_item] = owner
    end_of_lane = np.full(lane_count, width)
    end_of_lane[lane_of_item] = ends
    offsets = np.arange(width)
    visible = offsets < end_of_lane[:, None]
    if seen.window is not None:
        starts = chunk_of_item * width
        hidden = np.zeros((lane_count, 2), np.int64)
        hidden[lane_of_item, 0] = seen.sinks - starts
        hidden[lane_of_item, 1] = begins[owner] - starts
        visible &= (offsets < hidden[:, :1]) | (offsets >= hidden[:, 1:])
    mask = np.where(visible, np.float32(0), np.float32("-inf"))
    lane_mask = torch.from_numpy(mask).to(device, cache.pages.dtype).view(-1, 1, 1, width)
    pieces = [
        Piece(begin, end, block, None if index is None else index[begin:end].reshape(-1), lane_mask[begin:end])
        for begin, end, block in bounds
    ]
    rows: slice | torch.Tensor
    if int(batch_rows[-1]) - int(batch_rows[0]) == count - 1:
        rows = slice(int(batch_rows[0]), int(batch_rows[-1]) + 1)
    else:
        rows = torch.from_numpy(batch_rows.astype(np.int64)).to(device)
    in_order = lane_count == count and bool((lane_of_item == np.arange(count)).all())
    owners = None if in_order and most == 1 else torch.from_numpy(owner_of_lane).to(device)
    if most == 1:
        parts = None if in_order else torch.from_numpy(lane_of_item).to(device)
        return DecodeGroup(rows, width, pieces, owners, parts, None)
    part = np.arange(most)
    present = part < chunks[:, None]
    lanes_of_row = lane_of_item[np.where(present, first[:, None] + part, first[:, None])]
    absent = np.where(present, np.float32(0), np.float32("-inf"))
    return DecodeGroup(
        rows,
        width,
        pieces,
        owners,
        torch.from_numpy(lanes_of_row).to(device),
        torch.from_numpy(absent).to(device).view(count, most, 1, 1),
    )


def _in_place(
    blocks: npt.NDArray[np.int32],
) -> tuple[list[tuple[int, int, int]], npt.NDArray[np.int64]] | None:
    """Runs of near-by blocks to be read where they lie, as (first lane, end, first block), and the lane of each of
    ``blocks``; None if they lie too far apart for it to pay.

    A block that several sequences share needs a lane for each: runs of the first owners come first, then runs of the
    second, and so on.
    """
    order = np.argsort(blocks, kind="stable")
    ordered = blocks[order].astype(np.int64)
    steps = np.diff(ordered)
    turn = np.zeros(len(blocks), np.int64)
    if not steps.all():
        index = np.arange(len(blocks))
        turn = index - np.maximum.accumulate(np.where(np.concatenate(([1], steps)) != 0, index, 0))
        by_turn = np.argsort(turn, kind="stable")
        order, ordered, turn = order[by_turn], ordered[by_turn], turn[by_turn]
        steps = np.diff(ordered)
    cuts = np.flatnonzero((steps > _MAX_GAP + 1) | (np.diff(turn) != 0)) + 1
    if len(blocks) < _LANES_OF_CALL * len(cuts):
        return None
    begins = np.concatenate(([0], cuts))
    ends = np.concatenate((cuts, [len(blocks)]))
    first_blocks = ordered[begins]
    lengths = ordered[ends - 1] - first_blocks + 1
    first_lanes = np.cumsum(lengths) - lengths
    run = np.repeat(np.arange(len(begins)), ends - begins)
    lanes = np.empty(len(blocks), np.int64)
    lanes[order] = first_lanes[run] + ordered - first_blocks[run]
    return list(zip(first_lanes.tolist(), (first_lanes + lengths).tolist(), first_blocks.tolist(), strict=True)), lanes


def _grains_of_items(
    cache: PagedCache,
    starts: npt.NDArray[np.int64],
    width: int,
    ends: npt.NDArray[np.int32],
    begins: npt.NDArray[np.int32],
    sinks: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The grains of each chunk, counted from its sequence's beginning, and which of them hold a key that is seen: both
    ``[items, grains of a chunk]``."""
    first = starts[:, None] + np.arange(0, width, cache.grain)
    held = (first < ends[:, None]) & ((first + cache.grain > begins[:, None]) | (first < sinks))
    return first // cache.grain, held


def _grain_index(
    cache: PagedCache,
    block_tables: npt.NDArray[np.int32],
    owner: npt.NDArray[np.int64],
    grains: npt.NDArray[np.int64],
    held: npt.NDArray[np.bool_],
) -> torch.Tensor:
    """Rows of ``PagedCache.grain_rows`` for ``grains`` ``[items, n]`` of the sequences ``owner`` ``[items]``, the null
    block's where they are not ``held``: ``[items, 2, KV heads, n]``."""
    per_block = cache.block_size // cache.grain
    columns = np.minimum(grains // per_block, block_tables.shape[1] - 1)
    blocks = np.where(held, block_tables[owner[:, None], columns], 0).astype(np.int64)
    return cache.grain_index(
        torch.from_numpy(blocks).to(cache.pages.device), torch.from_numpy(grains % per_block).to(cache.pages.device)
    )


def _plan_prefill(
    cache: PagedCache, begin: int, count: int, length: int, block_table: npt.NDArray[np.int32], seen: _Visibility
) -> Prefill:
    device, dtype = cache.pages.device, cache.pages.dtype
    if seen.window is not None and length <= seen.window:
        seen = _Visibility(None, 0)
    if length == count and seen.window is None:
        return Prefill(begin, begin + count, None, length, None)
    grain_index = None
    if length == count:
        positions = np.arange(length)
    else:
        # The grains of the sinks, then from the first token's window on; the keys behind the end are cut off.
        first_seen = 0 if seen.window is None else max(0, length - count + 1 - seen.window)
        first = first_seen // cache.grain
        sink_grains = min(-(-seen.sinks // cache.grain), first)
        grains = np.concatenate((np.arange(sink_grains), np.arange(first, -(-length // cache.grain))))
        whole = np.ones((1, len(grains)), np.bool_)
        grain_index = _grain_index(cache, block_table[None], np.zeros(1, np.int64), grains[None], whole)
        positions = (grains[:, None] * cache.grain + np.arange(cache.grain)).reshape(-1)
        positions = positions[: len(positions) - (-length % cache.grain)]
        grain_index = grain_index.reshape(-1)
    mask = torch.full((count, len(positions)), float("-inf"), dtype=dtype, device=device)
    if seen.window is None:
        mask.triu_(length - count + 1)
    else:
        keys = torch.from_numpy(positions).to(device)
        queries = torch.arange(length - count, length, device=device).unsqueeze(1)
        visible = (keys <= queries) & ((keys > queries - seen.window) | (keys < seen.sinks))
        mask.masked_fill_(visible, 0.0)
    return Prefill(begin, begin + count, grain_index, len(positions), mask)
