"""Greedy tokens of the engine against transformers on the same de-quantised weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.messages import EngineRequest
from worker.engine.plan import SamplingParams
from worker.server.tokenizer import Tokenizer
from worker.weights.gguf import GGUFFile

if TYPE_CHECKING:
    from worker.execution.model_runner import ModelRunner

NEAR_TIE = 1e-4
"""Logits closer than this may swap places between two correct implementations."""

CHUNK = 64
"""Token budget of a step: longer prompts are computed in chunks, beside the decodes of others."""

NEW_TOKENS = 10

QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "List three prime numbers.",
    "Translate 'good morning' to Spanish.",
    "How do I boil an egg?",
    "Who wrote Hamlet?",
    "Explain photosynthesis in one sentence.",
    "Name a mammal that can fly.",
    "What is 12 times 12?",
    "Give me a synonym for happy.",
    "What does HTTP stand for?",
    "Tell me a joke about cats.",
    "What is the tallest mountain?",
]
PASSAGE = (
    "The river rose in the night, and by morning the meadow was a lake in which the fence posts stood like herons. "
    "Nobody in the village could remember a spring like it. The miller opened every gate he had, and still the water "
    "came over the weir in one brown sheet; the children, who had no school that day, sailed doors and barrels. "
)


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[list[int]]:
    """Chats shorter than a chunk, and raw texts: one token, around a block's edges, longer than one and two chunks."""
    tokenizer = Tokenizer.from_gguf(GGUFFile(smollm2_path).metadata)
    chats = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    passage = tokenizer.encode(PASSAGE * 4, allow_special=False)
    lengths = [1, 15, 16, 17, 33, CHUNK, CHUNK + 1, 2 * CHUNK + 10, 250]
    assert len(passage) > max(lengths)
    return [tokenizer.encode(chat, allow_special=True) for chat in chats] + [passage[:n] for n in lengths]


def generate(runner: ModelRunner, path: Path, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    """Greedy tokens of all prompts, run together."""
    engine = Engine(EngineConfig(model_path=str(path), max_batched_tokens=chunk, max_running=16), runner)
    greedy = SamplingParams(temperature=0.0)
    for index, prompt in enumerate(prompts):
        engine.add(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling=greedy,
                max_tokens=NEW_TOKENS,
                stop_token_ids=[],
            )
        )
    results: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            results[int(output.request_id)] += output.token_ids
    for key in range(len(prompts)):
        runner.forget(key)
    return results


WorstGap = Callable[[list[int], list[int]], float]


@pytest.fixture(scope="module")
def worst_gap(reference: Any) -> WorstGap:
    """How far below the reference's best logit our tokens' logits lie, at worst, each after the same prefix.

    0 where the reference would have chosen the same token: then, by induction, its greedy text is ours. The same
    tokens after the same prompt are judged once.
    """

    @functools.cache
    def judged(prompt: tuple[int, ...], generated: tuple[int, ...]) -> float:
        tokens = torch.tensor([prompt + generated])
        with torch.inference_mode():
            logits = reference(tokens, logits_to_keep=len(generated) + 1).logits[0, :-1]
        chosen = logits.gather(1, torch.tensor(generated).unsqueeze(1)).squeeze(1)
        return float((logits.amax(dim=-1) - chosen).max())

    return lambda prompt, generated: judged(tuple(prompt), tuple(generated))


def test_greedy_tokens_equal_transformers_in_a_batch_of_16(
    smollm2_runner: ModelRunner, smollm2_path: Path, prompts: list[list[int]], worst_gap: WorstGap
) -> None:
    results = generate(smollm2_runner, smollm2_path, prompts, CHUNK)
    assert len(prompts) >= 20
    assert [len(tokens) for tokens in results] == [NEW_TOKENS] * len(prompts)
    gaps = [worst_gap(prompt, tokens) for prompt, tokens in zip(prompts, results, strict=True)]
    assert max(gaps) < NEAR_TIE, gaps


def test_greedy_tokens_equal_transformers_alone(
    smollm2_runner: ModelRunner, smollm2_path: Path, prompts: list[list[int]], worst_gap: WorstGap
) -> None:
    for prompt in prompts:
        [tokens] = generate(smollm2_runner, smollm2_path, [prompt], CHUNK)
        assert len(tokens) == NEW_TOKENS
        assert worst_gap(prompt, tokens) < NEAR_TIE, prompt


def test_teacher_forcing_finds_a_wrong_token(prompts: list[list[int]], worst_gap: WorstGap) -> None:
    """The oracle itself: a token that the model would not choose is seen."""
    assert worst_gap(prompts[0], [0]) > 1.0
