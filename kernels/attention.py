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
"""Widths of the one chunk of a short sequence: multiples of this, or of the block size if that is larger."""

_GROUP_KEYS: Final = 1024
"""Most keys gathered at once: the copies of one group should still be in the core's cache when they are read."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decodes attended together, in chunks of one width. ``items`` counts chunks over all of them."""

    rows: slice | torch.Tensor
    """Where their queries stand in the batch: a slice if side by side, else indices."""
    width: int
    block_index: torch.Tensor
    """Rows of ``PagedCache.block_rows``, flat; as ``[items, 2, KV heads, blocks of a chunk]``."""
    mask: torch.Tensor
    """Added to the scores: ``[items, 1, 1, width]``, -inf beyond a sequence's end."""
    owner: torch.Tensor | None
    """The row of each item's query within the group; None: item ``i`` belongs to row ``i``."""
    parts: torch.Tensor | None
    """``[rows, most chunks]``: the items to be joined; None: one each."""
    absent: torch.Tensor | None
    """``[rows, most chunks, 1, 1]``: -inf where ``parts`` is padding."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    begin: int
    end: int
    block_index: torch.Tensor | None
    """Rows of ``PagedCache.block_rows`` as ``[2, KV heads, blocks]``; None: the span begins at position 0, so its own
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
    step = max(_NARROW_STEP, cache.block_size)
    widths = np.minimum(-(-seq_lens // step) * step, max(DECODE_CHUNK, cache.block_size))
    decodes: list[_DecodeGroup] = []
    for width in np.unique(widths[single]):
        alike = single[widths[single] == width]
        keys = np.cumsum(-(-seq_lens[alike] // width) * width)
        # A new group begins where another _GROUP_KEYS keys are full.
        for piece in np.split(alike, np.flatnonzero(np.diff((keys - 1) // _GROUP_KEYS)) + 1):
            decodes.append(_plan_decodes(cache, query_start[piece], seq_lens[piece], block_tables[piece], int(width)))
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
    most, items = int(chunks.max()), int(chunks.sum())
    blocks_of_chunk = width // cache.block_size
    owner = np.repeat(np.arange(count), chunks)
    first = np.concatenate(([0], np.cumsum(chunks)[:-1]))
    chunk_of_item = np.arange(items) - first[owner]

    most_blocks = most * blocks_of_chunk
    table = np.zeros((count, most_blocks), np.int64)
    used = min(most_blocks, block_tables.shape[1])
    table[:, :used] = block_tables[:, :used]
    table[np.arange(most_blocks) >= -(-seq_lens // cache.block_size)[:, None]] = 0
    blocks = torch.from_numpy(table.reshape(count, most, blocks_of_chunk)[owner, chunk_of_item]).to(device)
    block_index = cache.block_index(blocks).permute(0, 2, 3, 1).reshape(-1)

    keys = chunk_of_item[:, None] * width + np.arange(width)
    mask = np.where(keys < seq_lens[owner][:, None], np.float32(0), np.float32("-inf"))
    scores_mask = torch.from_numpy(mask).to(device, cache.pages.dtype).view(items, 1, 1, width)
    rows: slice | torch.Tensor
    if int(batch_rows[-1]) - int(batch_rows[0]) == count - 1:
        rows = slice(int(batch_rows[0]), int(batch_rows[-1]) + 1)
    else:
        rows = torch.from_numpy(batch_rows.astype(np.int64)).to(device)
    if most == 1:
        return _DecodeGroup(rows, width, block_index, scores_mask, None, None, None)
    part = np.arange(most)
    present = part < chunks[:, None]
    parts = np.where(present, first[:, None] + part, first[:, None])
    absent = np.where(present, np.float32(0), np.float32("-inf"))
    return _DecodeGroup(
        rows,
        width,
        block_index,
        scores_mask,
        torch.from_numpy(owner).to(device),
        torch.from_numpy(parts).to(device),
        torch.from_numpy(absent).to(device).view(count, most, 1, 1),
    )


def _plan_prefill(
    cache: PagedCache, begin: int, count: int, length: int, block_table: npt.NDArray[np.int32]
) -> _Prefill:
    if length == count:
        return _Prefill(begin, begin + count, None, length, None)
    device = cache.pages.device
    used = -(-length // cache.block_size)
    blocks = torch.from_numpy(block_table[:used].astype(np.int64)).to(device)
    block_index = cache.block_index(blocks).permute(1, 2, 0).reshape(-1)
    mask = torch.full((count, length), float("-inf"), dtype=cache.pages.dtype, device=device)
    mask.triu_(length - count + 1)
    return _Prefill(begin, begin + count, block_index, length, mask)


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
    gathered = torch.index_select(cache.block_rows(layer), 0, group.block_index).view(
        -1, 2, cache.num_kv_heads, group.width, cache.head_dim
    )
    keys, values = gathered[:, 0], gathered[:, 1]
    if group.owner is None or group.parts is None or group.absent is None:
        return _attend_with_lse(query, keys, values, group.mask)[0]
    output, lse = _attend_with_lse(query[group.owner], keys, values, group.mask)
    weights = torch.softmax(lse[group.parts] + group.absent, dim=1)
    return output[group.parts].mul_(weights.unsqueeze(-1).to(output.dtype)).sum(dim=1)


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
    if span.block_index is None:
        heads_first = kv.permute(1, 0, 2).unsqueeze(1)
        keys, values = heads_first[:kv_heads], heads_first[kv_heads:]
    else:
        gathered = torch.index_select(cache.block_rows(layer), 0, span.block_index).view(
            2, kv_heads, 1, -1, cache.head_dim
        )[..., : span.length, :]
        keys, values = gathered[0], gathered[1]
    shape = (kv_heads, query.shape[2], span.length, cache.head_dim)
    return torch.nn.functional.scaled_dot_product_attention(
        queries, keys.expand(shape), values.expand(shape), attn_mask=span.mask, is_causal=span.mask is None
    )
