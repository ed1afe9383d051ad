"""Overlap and preemption with the small real model."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.worker.engine.asking import drain, request, tokens_of
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.plan import SamplingParams

if TYPE_CHECKING:
    from worker.execution.model_runner import ModelRunner


class SmallPool:
    """A runner that says it has fewer blocks than it has."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        self._runner = runner
        self.num_blocks = num_blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def test_texts_are_the_same_with_and_without_overlap_and_preemption(smollm2_runner: ModelRunner) -> None:
    source = random.Random(3)
    prompts = [[source.randrange(100, 49_000) for _ in range(length)] for length in (30, 14, 15)]
    texts, preemptions = [], []
    for overlap, num_blocks in [(False, 100), (True, 100), (True, 5)]:
        runner = SmallPool(smollm2_runner, num_blocks)
        config = EngineConfig(
            model_path="", overlap=overlap, max_running=3, max_batched_tokens=40, prefix_caching=False
        )
        made = Engine(config, runner)
        for index, prompt in enumerate(prompts):
            made.add(request(f"r{index}", prompt, 6, sampling=SamplingParams(temperature=0.0)))
        outputs = drain(made)
        for key in made._scheduler._roster.retired_keys:
            runner.forget(key)
        texts.append([tokens_of(outputs[f"r{index}"]) for index in range(3)])
        preemptions.append(made.stats.preemptions)
    assert texts[0] == texts[1] == texts[2]
    assert preemptions[0] == 0 < preemptions[2]
