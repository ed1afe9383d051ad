from __future__ import annotations

import pytest
import torch

from worker.engine.plan import SamplingParams
from worker.execution.sampled_row import SampledRow, SequenceSampling
from worker.execution.sampler import Sampler

CPU = torch.device("cpu")
NOTHING_HELD = torch.zeros(1, 1, dtype=torch.int32)


def draw(logits: torch.Tensor, sampling: list[SamplingParams], positions: list[int]) -> torch.Tensor:
    rows = [SampledRow(SequenceSampling(params, 0), at, 0) for params, at in zip(sampling, positions, strict=True)]
    return Sampler(logits.shape[1], CPU).draw(logits, rows, NOTHING_HELD).tokens


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-45, 1e-39])
def test_temperatures_too_small_to_divide_by_are_greedy(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 1000)
    logits[3, 5] = logits[3, 900] = 50.0
    tokens = draw(logits, [SamplingParams(temperature=temperature, top_p=0.9, seed=seed) for seed in range(8)], [7] * 8)
    assert tokens.tolist() == logits.argmax(dim=-1).tolist()
    assert int(tokens[3]) == 5


def test_greedy_and_drawn_rows_mix() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 50)
    params = [SamplingParams(temperature=t, seed=3) for t in (0.0, 1.0, 1e-300, 2.0)]
    together = draw(logits, params, [4, 5, 6, 7]).tolist()
    alone = [int(draw(logits[i : i + 1], [params[i]], [4 + i])) for i in range(4)]
    assert together == alone
    assert together[::2] == logits[::2].argmax(dim=-1).tolist()
