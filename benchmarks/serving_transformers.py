"""The peer: transformers' own continuous batching, in this process, over the same weights in fp32."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from serving_workload import Ask, Timeline
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers_reference import load_reference

_PAGE: int = 256


def drive_transformers(
    path: Path, asks: Sequence[Ask], *, threads: int, max_running: int, max_batched_tokens: int, limit_s: float
) -> tuple[list[Timeline], float]:
    """As ``serving_http.drive``, without HTTP: requests go to the manager, which notes the time of each token.

    It gets the same bounds as our worker: requests and tokens in a step; its cache holds them all. On CPU it runs with
    ``sdpa`` and masks over the whole batch, for flash attention's variable lengths need a GPU.
    """
    torch.set_num_threads(threads)
    model = load_reference(path)
    longest = max(len(ask.token_ids) + ask.max_tokens for ask in asks)
    settings = ContinuousBatchingConfig(
        page_size=_PAGE,
        num_blocks=max_running * -(-longest // _PAGE) + 1,
        max_batch_tokens=max_batched_tokens,
        max_requests_per_batch=max_running,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=-1, pad_token_id=0)
    timelines = [Timeline(ask.arrival_s) for ask in asks]
    manager_of: Any = model.continuous_batching_context_manager
    with manager_of(
        generation_config=generation, continuous_batching_config=settings, block=True, timeout=30
    ) as manager:
        _finish(manager, [manager.add_request([5] * 16, max_new_tokens=4, eos_token_id=-1)])  # what is compiled once
        began = time.perf_counter()
        waiting: dict[str, int] = {}
        sent = 0
        while sent < len(asks) or waiting:
            now = time.perf_counter() - began
            if now > limit_s or not manager.is_running():
                break
            while sent < len(asks) and asks[sent].arrival_s <= now:
                ask = asks[sent]
                name = manager.add_request(
                    ask.token_ids, max_new_tokens=ask.max_tokens, record_timestamps=True, eos_token_id=-1
                )
                waiting[name] = sent
                sent += 1
            due = asks[sent].arrival_s - now if sent < len(asks) else 0.25
            result = manager.get_result(timeout=max(0.001, min(0.25, due)))
            if result is None or not result.is_finished():
                continue
            line = timelines[waiting.pop(result.request_id)]
            line.tokens = len(result.generated_tokens)
            line.pieces = [at - began for at in result.timestamps or []]
            line.error = result.error
            line.ended_s = line.pieces[-1] if line.pieces and not result.error else None
        wall_s = time.perf_counter() - began
        for name in waiting:
            manager.cancel_request(name)
    return timelines, min(wall_s, max((line.ended_s or wall_s) for line in timelines))


def _finish(manager: Any, names: Sequence[str]) -> None:
    left = set(names)
    while left and manager.is_running():
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            left.discard(result.request_id)
