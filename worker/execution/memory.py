"""How many KV blocks there are: what was asked for, or what the free memory allows."""

from __future__ import annotations

from typing import Final

import torch

from kernels.cache import page_bytes
from kernels.device import compute_dtype, free_memory, kv_block_size, release_memory
from worker.engine.config import EngineConfig
from worker.engine.plan import CacheGroup
from worker.execution.prompt_logprobs import SLICE_ROWS
from worker.model.config import DecoderConfig
from worker.model.decoder import Decoder

_BLOCK_STEP: Final = 16
"""Kernels take blocks of multiples of so many tokens."""

_ROTATION_BYTES: Final = 20
"""Of each position and dimension of a head, while the table of rotations is made in float64."""

_TOKEN_BYTES: Final = 64
"""Of each position: the tokens of the rows that a runner begins with."""

_LOGITS_COPIES: Final = 4

_EXPANDED_BYTES: Final = 8
"""Of each element of a weight while it is expanded: its codes, fp32, and the 16 bits that are multiplied with."""

_CPU_POOL_BYTES: Final = 2 << 30
_CPU_POOL_SHARE: Final = 0.25
_CUDA_POOL_SHARE: Final = 0.85


def block_size_of(config: EngineConfig, device: torch.device) -> int:
    """Tokens in a KV block. Raises ``ValueError`` for a size that no kernel takes."""
    if config.block_size is None:
        return kv_block_size(device)
    size = config.block_size
    if size < 1 or size % _BLOCK_STEP:
        raise ValueError(f"block_size is {size}; it must be a multiple of {_BLOCK_STEP}")
    return size


def check_length(max_model_len: int, shape: DecoderConfig, device: torch.device) -> None:
    """Raise ``ValueError`` if there is no room for what grows with the longest sequence before there is any: a file may
    name any context length."""
    wanted = max_model_len * (_ROTATION_BYTES * shape.head_dim + _TOKEN_BYTES)
    if wanted > (room := free_memory(device)):
        raise ValueError(
            f"sequences of {max_model_len} tokens need {wanted} bytes of memory before the first begins, and {room} "
            "are free; give a smaller max_model_len"
        )


def pool_sizes(
    config: EngineConfig, device: torch.device, model: Decoder, block_size: int, max_model_len: int
) -> tuple[int, int]:
    """Blocks of the device's pool, the null block included, and of the host tier. Call it when the model is loaded.

    ``max_model_len``: most tokens of one sequence. Raises ``ValueError`` for a pool without room for a block.
    """
    release_memory(device)  # what loading has left in allocators is free
    shape, layout = model.config, model.layout
    dtype = compute_dtype(device)
    page = page_bytes(layout.layers_per_page, shape.num_kv_heads, block_size, shape.head_dim, dtype)
    longest = sum(_most_blocks(group, config.max_batched_tokens, block_size, max_model_len) for group in layout.groups)
    if config.kv_cache_bytes is not None:
        if config.kv_cache_bytes > (room := free_memory(device)):
            # On CPU memory is taken as it is written: too large a pool would end the process much later.
            raise ValueError(
                f"kv_cache_bytes is {config.kv_cache_bytes}, but beside the model only {room} bytes of memory are "
                "free; give less, or leave it out to fit the pool to what is free"
            )
        blocks = config.kv_cache_bytes // page
    else:
        on_gpu = device.type != "cpu"
        free = max(0, free_memory(device) - _step_bytes(config, shape, max_model_len, dtype, on_gpu=on_gpu))
        share = int(free * _CUDA_POOL_SHARE) if on_gpu else min(_CPU_POOL_BYTES, int(free * _CPU_POOL_SHARE))
        blocks = min(share // page, 1 + config.max_running * longest)
    if blocks < 2:
        raise ValueError(
            f"the KV pool is too small for one block of {block_size} tokens beside the null block; give "
            f"kv_cache_bytes of at least {2 * page}, or {(1 + longest) * page} for the longest sequence"
        )
    return blocks, _host_blocks(config.host_kv_bytes, page, blocks * page if device.type == "cpu" else 0)


def _step_bytes(
    config: EngineConfig, shape: DecoderConfig, max_model_len: int, dtype: torch.dtype, *, on_gpu: bool
) -> int:
    """What the largest step takes beside weights and pool: activations of a layer, a mask, logits in fp32 with the
    copies that are made to draw from them, and on a GPU the largest weight, which may be quantised, expanded."""
    widths = 4 * shape.hidden_size + 2 * shape.query_size + 4 * shape.kv_size + 3 * shape.mlp_size
    tokens = config.max_batched_tokens * (widths + max_model_len) * dtype.itemsize
    logits = max(config.max_running, SLICE_ROWS) * shape.vocab_size * 4 * _LOGITS_COPIES
    largest = max(shape.vocab_size, 2 * shape.mlp_size) * shape.hidden_size
    return tokens + logits + (largest * _EXPANDED_BYTES if on_gpu else 0)


def _most_blocks(group: CacheGroup, max_batched_tokens: int, block_size: int, max_model_len: int) -> int:
    """Blocks of one group that the longest sequence may hold at a time."""
    whole = -(-max_model_len // block_size)
    if group.window is None:
        return whole
    # A window is left behind only when a step has retired, and neither it nor a step begins at a block's edge.
    return min(whole, -(-(group.sinks + group.window + max_batched_tokens) // block_size) + 2)


def _host_blocks(asked: int, page: int, pool_bytes: int) -> int:
    """``pool_bytes``: what the device's pool takes of the host's memory."""
    if asked == 0:
        return 0
    if asked < page:
        raise ValueError(f"host_kv_bytes is {asked}; one block takes {page}: give that or more, or 0 for no host tier")
    free = max(0, free_memory(torch.device("cpu")) - pool_bytes)
    if asked > free:
        raise ValueError(
            f"host_kv_bytes is {asked}, but beside the model and its KV pool only {free} bytes of memory are free; "
            "give less, or 0 for no host tier"
        )
    return asked // page
