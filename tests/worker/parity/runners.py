"""Runners of tiny checkpoints, with a pool of a given number of blocks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from kernels.cache import page_bytes
from tests.worker.parity.checkpoints import Checkpoint
from worker.engine.config import EngineConfig
from worker.model.cache_groups import cache_layout
from worker.weights.checkpoint_config import decoder_config

if TYPE_CHECKING:
    from worker.execution.model_runner import ModelRunner


def make_config(checkpoint: Checkpoint, block_size: int, num_blocks: int, **settings: Any) -> EngineConfig:
    shape = decoder_config(json.loads((checkpoint.path / "config.json").read_text()))
    layers = cache_layout(shape).layers_per_page
    page = page_bytes(layers, shape.num_kv_heads, block_size, shape.head_dim, torch.float32)
    values = {"device": "cpu", "threads": 1, "max_batched_tokens": 256} | settings
    return EngineConfig(
        model_path=str(checkpoint.path), block_size=block_size, kv_cache_bytes=num_blocks * page, **values
    )


def make_runner(config: EngineConfig) -> ModelRunner:
    from worker.execution.model_runner import ModelRunner

    return ModelRunner(config)
