"""The whole engine on tiny checkpoints: prefix cache, cache groups, chunks, preemption and overlap leave the greedy
tokens what transformers would choose."""

from __future__ import annotations

import pytest

from tests.worker.parity.checkpoints import Checkpoint, prompt
from tests.worker.parity.runners import make_config, make_runner
from worker.engine.engine import Engine
from worker.engine.messages import EngineOutput, EngineRequest
from worker.engine.plan import SamplingParams

NEW_TOKENS = 44
"""More than a window, so that decodes leave blocks behind."""


def run(engine: Engine, prompts: list[list[int]], first: int) -> tuple[list[list[int]], list[int]]:
    """Greedy tokens of each prompt, and how many of its tokens were in the cache."""
    for index, tokens in enumerate(prompts, start=first):
        engine.add(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=tokens,
                sampling=SamplingParams(temperature=0.0),
                max_tokens=NEW_TOKENS,
                stop_token_ids=[],
            )
        )
    outputs: dict[str, list[EngineOutput]] = {str(first + index): [] for index in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    tokens = [[token for output in given for token in output.token_ids] for given in outputs.values()]
    cached = [
        next(output.cached_tokens for output in given if output.cached_tokens is not None) for given in outputs.values()
    ]
    assert all(given[-1].finish_reason == "length" for given in outputs.values())
    return tokens, cached


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("checkpoint", "num_blocks"),
    [("gqa", 60), ("sliding", 20), ("mixed", 90), ("uneven", 70)],
    indirect=["checkpoint"],
)
def test_greedy_tokens_through_the_engine_equal_transformers(
    checkpoint: Checkpoint, num_blocks: int, overlap: bool
) -> None:
    config = make_config(
        checkpoint, 16, num_blocks, max_batched_tokens=64, max_running=16, overlap=overlap, check_every_step=True
    )
    engine = Engine(config, make_runner(config))
    system = prompt(100, 0)
    prompts = [system + prompt(length, length) for length in (1, 3, 10, 12, 30, 44, 60, 61)]
    prompts += [prompt(length, 100 + length) for length in (1, 15, 16, 17, 40, 41, 90, 150)]
    first, _ = run(engine, prompts, 0)
    again, cached = run(engine, prompts[:8], 100)
    for asked, drawn in zip(prompts + prompts[:8], first + again, strict=True):
        assert len(drawn) == NEW_TOKENS
        expected = checkpoint.logits(asked + drawn[:-1])[len(asked) - 1 :]
        assert drawn == expected.argmax(dim=-1).tolist()
    assert max(cached) >= 96, "the system prompt is in the cache"
    assert engine.stats.preemptions > 0
