"""Causal attention over a paged KV cache, for batches of sequences of any lengths (Kwon et al., SOSP 2023).

``kernels.attention_plan`` plans a step once; each layer then attends by that plan.
"""

from __future__ import annotations

import torch

from kernels.attention_plan import AttentionPlan, DecodeGroup, Piece, Prefill
from kernels.cache import PagedCache


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


def _attend_decodes(query: torch.Tensor, cache: PagedCache, layer: int, group: DecodeGroup) -> torch.Tensor:
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


def _keys_and_values(cache: PagedCache, layer: int, width: int, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
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
    query: torch.Tensor, kv: torch.Tensor, cache: PagedCache, layer: int, span: Prefill
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
        )[..., : span.keys, :]
        keys, values = gathered[0], gathered[1]
    shape = (kv_heads, query.shape[2], span.keys, cache.head_dim)
    return torch.nn.functional.scaled_dot_product_attention(
        queries, keys.expand(shape), values.expand(shape), attn_mask=span.mask, is_causal=span.mask is None
    )
