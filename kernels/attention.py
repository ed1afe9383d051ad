"""Causal attention over a paged KV cache, for batches of sequences of any lengths (Kwon et al., SOSP 2023).

A step's plan is made once and used by every layer. Sequences with one new token (decodes) are cut into chunks of
``DECODE_CHUNK`` keys; each chunk is attended on its own and the parts are joined by their log-sum-exp, as in
Flash-Decoding (Dao et al., 2023). A sequence within one chunk takes one as narrow as its length allows. So the products
for a sequence depend on its length alone, and its result is bitwise the same alone and in any batch. Sequences with
more new tokens (prefills) are attended one by one over their exact lengths.
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
class _Piece:
    """Chunks attended by one call, a *lane* each: ``begin`` to ``end`` among the group's lanes."""

    begin: int
    end: int
    first_block: int
    """Lane ``begin + i`` is block ``first_block + i``, read where it lies."""
    grain_index: torch.Tensor | None
    """Else rows of ``PagedCache.grain_rows`` to be copied together, flat; as ``[lanes, 2, KV heads, grains]``."""
    mask: torch.Tensor
    """Added to the scores: ``[lanes, 1, 1, width]``, -inf beyond a sequence's end."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decodes attended in chunks of one width."""

    rows: slice | torch.Tensor
    """Where their queries stand in the batch: a slice if side by side, else indices."""
    width: int
    pieces: list[_Piece]
    owner: torch.Tensor | None
    """The row of each lane's query within the group; None: lane ``i`` belongs to row ``i``."""
    parts: torch.Tensor | None
    """``[rows, most chunks]``: the lanes to be joined, or ``[rows]``: the one lane of each; None: lane ``i`` is row
    ``i``."""
    absent: torch.Tensor | None
    """``[rows, most chunks, 1, 1]``: -inf where ``parts`` is padding; None: one chunk each."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    begin: int
    end: int
    grain_index: torch.Tensor | None
    """Rows of ``PagedCache.grain_rows`` as ``[2, KV heads, grains]``; None: the span begins at position 0, so its own
    keys and values are all there is."""
    length: int
    mask: torch.Tensor | None
    """Added to the scores: ``[end - begin, length]``."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one step's attention needs to know, in the device's own form; made by ``plan_attention``."""

    decodes: list[_DecodeGroup]
    prefills: list[_Prefill]


def plan_attention(
    cache: PagedCache,
    query_start: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    block_tables: npt.NDArray[np.int32],
) -> AttentionPlan:
    """Plan one step's attention.

    ``query_start`` ``[sequences + 1]``: where each sequence's new tokens begin in the batch. ``seq_lens``
    ``[sequences]``: tokens known to each after this step, its new ones included. ``block_tables`` ``[sequences, most
    blocks]``, padded with block 0.
    """
    counts = np.diff(query_start)
    prefills = [
        _plan_prefill(cache, int(query_start[row]), int(counts[row]), int(seq_lens[row]), block_tables[row])
        for row in np.flatnonzero(counts != 1)
    ]
    single = np.flatnonzero(counts == 1)
    widths = np.minimum(-(-seq_lens // _NARROW_STEP) * _NARROW_STEP, max(DECODE_CHUNK, cache.block_size))
    decodes = []
    for width in np.unique(widths[single]):
        alike = single[widths[single] == width]
        decodes.append(_plan_decodes(cache, query_start[alike], seq_lens[alike], block_tables[alike], int(width)))
    return AttentionPlan(decodes, prefills)


def _plan_decodes(
    cache: PagedCache,
    batch_rows: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    block_tables: npt.NDArray[np.int32],
    width: int,
) -> _DecodeGroup:
    device = cache.pages.device
    count = len(seq_lens)
    chunks = -(-seq_lens // width)
    most = int(chunks.max())
    # An item is one chunk of one sequence.
    owner = np.repeat(np.arange(count), chunks)
    first = np.cumsum(chunks) - chunks
    chunk_of_item = np.arange(len(owner)) - first[owner]
    ends = np.minimum(seq_lens[owner] - chunk_of_item * width, width)

    lanes = None if cache.block_size < DECODE_CHUNK else _in_place(block_tables[owner, chunk_of_item])
    if lanes is None:
        lane_of_item = np.arange(len(owner))
        owner_of_lane, end_of_lane = owner, ends
        index = _gather_index(cache, seq_lens, block_tables, owner, chunk_of_item, width)
        size = max(1, _GROUP_KEYS // width)
        bounds = [(begin, min(begin + size, len(owner)), 0) for begin in range(0, len(owner), size)]
    else:
        bounds, lane_of_item = lanes
        index = None
        # A strange block is attended with some query, and whatever comes of it is left unread.
        owner_of_lane = np.zeros(bounds[-1][1], np.int64)
        owner_of_lane[lane_of_item] = owner
        end_of_lane = np.full(len(owner_of_lane), width)
        end_of_lane[lane_of_item] = ends

    mask = np.where(np.arange(width) < end_of_lane[:, None], np.float32(0), np.float32("-inf"))
    lane_mask = torch.from_numpy(mask).to(device, cache.pages.dtype).view(-1, 1, 1, width)
    pieces = [
        _Piece(begin, end, block, None if index is None else index[begin:end].reshape(-1), lane_mask[begin:end])
        for begin, end, block in bounds
    ]
    rows: slice | torch.Tensor
    if int(batch_rows[-1]) - int(batch_rows[0]) == count - 1:
        rows = slice(int(batch_rows[0]), int(batch_rows[-1]) + 1)
    else:
        rows = torch.from_numpy(batch_rows.astype(np.int64)).to(device)
    in_order = len(owner_of_lane) == count and bool((lane_of_item == np.arange(count)).all())
    owners = None if in_order and most == 1 else torch.from_numpy(owner_of_lane).to(device)
    if most == 1:
        parts = None if in_order else torch.from_numpy(lane_of_item).to(device)
        return _DecodeGroup(rows, width, pieces, owners, parts, None)
    part = np.arange(most)
    present = part < chunks[:, None]
    lanes_of_row = lane_of_item[np.where(present, first[:, None] + part, first[:, None])]
    absent = np.where(present, np.float32(0), np.float32("-inf"))
    return _DecodeGroup(
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
    ``blocks``; None if they lie too far apart for it to pay."""
    order = np.argsort(blocks, kind="stable")
    ordered = blocks[order].astype(np.int64)
    steps = np.diff(ordered)
    # A block that two sequences share needs a lane for each: a run begins anew at it.
    cuts = np.flatnonzero((steps > _MAX_GAP + 1) | (steps == 0)) + 1
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


def _gather_index(
    cache: PagedCache,
    seq_lens: npt.NDArray[np.int32],
    block_tables: npt.NDArray[np.int32],
    owner: npt.NDArray[np.int64],
    chunk_of_item: npt.NDArray[np.int64],
    width: int,
) -> torch.Tensor:
    """Rows of ``PagedCache.grain_rows`` for each item: ``[items, 2, KV heads, grains of a chunk]``."""
    count, most = len(seq_lens), int(chunk_of_item.max()) + 1
    blocks_of_chunk = -(-width // cache.block_size)
    table = np.zeros((count, most * blocks_of_chunk), np.int64)
    used = min(table.shape[1], block_tables.shape[1])
    table[:, :used] = block_tables[:, :used]
    table[np.arange(table.shape[1]) >= -(-seq_lens // cache.block_size)[:, None]] = 0
    blocks = torch.from_numpy(table.reshape(count, most, blocks_of_chunk)[owner, chunk_of_item])
    index = cache.grain_index(blocks.to(cache.pages.device)).permute(0, 2, 3, 1, 4).flatten(3)
    return index[..., : width // cache.grain]


def _plan_prefill(
    cache: PagedCache, begin: int, count: int, length: int, block_table: npt.NDArray[np.int32]
) -> _Prefill:
    if length == count:
        return _Prefill(begin, begin + count, None, length, None)
    device = cache.pages.device
    used = -(-length // cache.block_size)
    blocks = torch.from_numpy(block_table[:used].astype(np.int64)).to(device)
    grain_index = cache.grain_index(blocks).permute(1, 2, 0, 3).reshape(-1)
    mask = torch.full((count, length), float("-inf"), dtype=cache.pages.dtype, device=device)
    mask.triu_(length - count + 1)
    return _Prefill(begin, begin + count, grain_index, length, mask)


def paged_attention(
    query: torch.Tensor, kv: torch.Tensor, cache: PagedCache, layer: int, plan: AttentionPlan
) -> torch.Tensor:
    """Attend every new token to its sequence's keys, its own included; call after ``write_kv`` of the same layer.

    ``query`` ``[tokens, query heads, head_dim]``, ``kv`` ``[tokens, 2 * KV heads, head_dim]`` (the new keys, then
    values): views are fine, last dimension contiguous. Query head ``h`` reads KV head
    ``h // (query heads / KV heads)``. Returns ``[tokens, query heads * head_dim]``.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = cache.num_kv_heads
    grouped = query.view(tokens, kv_heads, heads // kv_heads, head_dim)
    if len(plan.decodes) == 1 and not plan.prefills:
        # Spans stand in the plan's order, so these are all rows, in order.
        return _attend_decodes(grouped, cache, layer, plan.decodes[0]).reshape(tokens, heads * head_dim)
    output = query.new_empty(tokens, kv_heads, heads // kv_heads, head_dim)
    for group in plan.decodes:
        output[group.rows] = _attend_decodes(grouped[group.rows], cache, layer, group)
    for span in plan.prefills:
        rows = slice(span.begin, span.end)
        result = _attend_prefill(grouped[rows], kv[rows], cache, layer, span)
        output[rows].permute(1, 2, 0, 3).copy_(result)
    return output.view(tokens, heads * head_dim)


def _attend_decodes(query: torch.Tensor, cache: PagedCache, layer: int, group: _DecodeGroup) -> torch.Tensor:
    """``[rows, KV heads, group, head_dim]`` to the same."""
    lanes = query if group.owner is None else query.index_select(0, group.owner)
    results = [
        _attend_with_lse(
            lanes[piece.begin : piece.end], *_keys_and_values(cache, layer, group.width, piece), piece.mask
        )
        for piece in group.pieces
    ]
    output = results[0][0] if len(results) == 1 else torch.cat([result for result, _ in results])
    if group.parts is None:
        return output
    if group.absent is None:
        return output.index_select(0, group.parts)
    lse = results[0][1] if len(results) == 1 else torch.cat([result for _, result in results])
    weights = torch.softmax(lse[group.parts] + group.absent, dim=1)
    return output[group.parts].mul_(weights.unsqueeze(-1).to(output.dtype)).sum(dim=1)


def _keys_and_values(cache: PagedCache, layer: int, width: int, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor]:
    """``[lanes, KV heads, width, head_dim]`` each."""
    if piece.grain_index is None:
        return cache.block_range(layer, piece.first_block, piece.end - piece.begin, width)
    gathered = torch.index_select(cache.grain_rows(layer), 0, piece.grain_index).view(
        -1, 2, cache.num_kv_heads, width, cache.head_dim
    )
    return gathered[:, 0], gathered[:, 1]


def _attend_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``[items, heads, queries, head_dim]`` and each row's log-sum-exp ``[items, heads, queries]``."""
    if query.device.type == "cpu":
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, attn_mask=mask)
        return output, lse
    scores = (query @ keys.transpose(-1, -2)).to(torch.float32) * query.shape[-1] ** -0.5 + mask
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.unsqueeze(-1)).to(values.dtype) @ values, lse


def _attend_prefill(
    query: torch.Tensor, kv: torch.Tensor, cache: PagedCache, layer: int, span: _Prefill
) -> torch.Tensor:
    """``[count, KV heads, group, head_dim]`` to ``[KV heads, group, count, head_dim]``."""
    kv_heads = cache.num_kv_heads
    queries = query.permute(1, 2, 0, 3)
    if span.grain_index is None:
        heads_first = kv.permute(1, 0, 2).unsqueeze(1)
        keys, values = heads_first[:kv_heads], heads_first[kv_heads:]
    else:
        gathered = torch.index_select(cache.grain_rows(layer), 0, span.grain_index).view(
            2, kv_heads, 1, -1, cache.head_dim
        )[..., : span.length, :]
        keys, values = gathered[0], gathered[1]
    shape = (kv_heads, query.shape[2], span.length, cache.head_dim)
    return torch.nn.functional.scaled_dot_product_attention(
        queries, keys.expand(shape), values.expand(shape), attn_mask=span.mask, is_causal=span.mask is None
    )
