from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from worker.engine.config import EngineConfig
from worker.engine.plan import NewSequence, SamplingParams, Span, StepPlan

if TYPE_CHECKING:
    from worker.execution.model_runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """Gives sequences blocks, a page at a time from scattered places, and drives the runner with plans."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        last = runner.num_blocks - 1
        self.free = torch.randperm(last, generator=torch.Generator().manual_seed(0)).add(1).tolist()
        self.blocks: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.known: dict[int, int] = {}

    def span(self, key: int, count: int | None = None) -> Span:
        """The next ``count`` known tokens (None: all)."""
        start = self.computed.get(key, 0)
        count = self.known[key] - start if count is None else count
        needed = -(-(start + count) // self.runner.block_size) - self.blocks.get(key, 0)
        new = [self.free.pop() for _ in range(needed)]
        self.blocks[key] = self.blocks.get(key, 0) + needed
        self.computed[key] = start + count
        sample = self.computed[key] == self.known[key]
        self.known[key] += sample
        return Span(key, start, count, [new] if new else [], sample)

    def new(self, key: int, tokens: list[int], sampling: SamplingParams = GREEDY) -> NewSequence:
        self.known[key] = len(tokens)
        return NewSequence(key, tokens, sampling)

    def logits(self, new: list[NewSequence], spans: list[Span]) -> torch.Tensor:
        handle = self.runner.forward(StepPlan(0, new, spans, []))
        self.runner.sample(handle)
        assert handle.logits is not None
        return handle.logits

    def tokens(self, new: list[NewSequence], spans: list[Span]) -> list[int]:
        return self.runner.sample(self.runner.forward(StepPlan(0, new, spans, []))).result().tokens


@pytest.fixture
def driver(smollm2_runner: ModelRunner) -> Iterator[Driver]:
    made = Driver(smollm2_runner)
    yield made
    for key in made.known:
        smollm2_runner.forget(key)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 49_000, (length,), generator=generator).tolist()


@pytest.fixture
def whole_chunk_driver(smollm2_path: Path) -> Driver:
    """Of a runner with the block size that CPU takes by default; blocks are handed out side by side."""
    from worker.execution.model_runner import ModelRunner

    made = Driver(ModelRunner(EngineConfig(model_path=str(smollm2_path), device="cpu", kv_cache_bytes=60 * 5_898_240)))
    assert (made.runner.block_size, made.runner.num_blocks) == (128, 60)
    made.free.sort()
    return made


@pytest.mark.parametrize("kind", ["driver", "whole_chunk_driver"])
def test_logits_are_bitwise_the_same_alone_and_in_any_batch(kind: str, request: pytest.FixtureRequest) -> None:
    """Decodes of many lengths, alone and beside each other and beside a prefill: batch size never changes the text."""
    driver: Driver = request.getfixturevalue(kind)
    prompts = {1000 + length: prompt(length, length) for length in (1, 7, 16, 31, 100, 127, 128, 129, 300)}
    size = driver.runner.block_size
    blocks = {key: [driver.free.pop() for _ in range(len(tokens) // size + 1)] for key, tokens in prompts.items()}
    new = [driver.new(key, tokens) for key, tokens in prompts.items()]
    first = driver.tokens(new, [Span(key, 0, len(tokens), [blocks[key]], True) for key, tokens in prompts.items()])

    def decoded(base: int, together: bool) -> list[torch.Tensor]:
        """Two decodes of each, as after a hit in the prefix cache: all read what one prefill has left in its blocks."""
        keys = [base + key for key in prompts]
        new, spans = [], []
        for key, (known, tokens), token in zip(keys, prompts.items(), first, strict=True):
            new.append(driver.new(key, [*tokens, token]))
            driver.computed[key], driver.blocks[key] = len(tokens), len(blocks[known])
            span = driver.span(key)
            spans.append(Span(key, span.start, 1, [blocks[known]], True))
        results = []
        for _ in range(2):
            if together:
                extra = base + 100 + len(results)
                stranger = driver.new(extra, prompt(50, extra))
                rows = driver.logits([*new, stranger], [*spans, driver.span(extra)])
                results.append(rows[:-1].clone())
            else:
                results.append(torch.cat([driver.logits(new[at : at + 1], [span]) for at, span in enumerate(spans)]))
            new, spans = [], [driver.span(key) for key in keys]
        return results

    for alone, batched in zip(decoded(1000, False), decoded(3000, True), strict=True):
        assert torch.equal(alone, batched)


def test_chunks_give_the_logits_of_the_whole_prompt(driver: Driver) -> None:
    tokens = prompt(90, 1)
    whole = driver.logits([driver.new(1, tokens)], [driver.span(1)])
    started = driver.new(2, tokens)
    assert driver.tokens([started], [driver.span(2, 33)]) == []
    assert driver.tokens([], [driver.span(2, 1)]) == []
    assert driver.tokens([], [driver.span(2, 40)]) == []
    torch.testing.assert_close(driver.logits([], [driver.span(2)]), whole, atol=1e-3, rtol=0)


def test_logits_of_long_random_texts_equal_transformers(driver: Driver, reference: Any) -> None:
    """Texts in which no passage stands twice, over forty scattered blocks, in uneven chunks and then a few decodes:
    a block read in another's place shows."""
    texts = [prompt(600, 21), prompt(571, 22)]
    keys = [50, 51]
    new = [driver.new(key, tokens) for key, tokens in zip(keys, texts, strict=True)]
    driver.tokens(new, [driver.span(50, 7), driver.span(51, 190)])
    driver.tokens([], [driver.span(50, 333), driver.span(51, 180)])
    steps = [driver.logits([], [driver.span(key) for key in keys])]
    for _ in range(4):
        for tokens, row in zip(texts, steps[-1], strict=True):
            tokens.append(int(row.argmax()))
        steps.append(driver.logits([], [driver.span(key) for key in keys]))
    for index, tokens in enumerate(texts):
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens]), logits_to_keep=len(steps)).logits[0]
        ours = torch.stack([rows[index] for rows in steps])
        torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)


def test_a_sequence_sent_again_goes_on_where_it_was(driver: Driver) -> None:
    """As after preemption: the tokens drawn so far come back as known tokens, in other blocks."""
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
    tokens = prompt(20, 2)
    drawn = driver.tokens([driver.new(3, tokens, sampling)], [driver.span(3)])
    for _ in range(5):
        drawn += driver.tokens([], [driver.span(3)])
    again = driver.tokens([driver.new(4, tokens + drawn[:3], sampling)], [driver.span(4)])
    for _ in range(2):
        again += driver.tokens([], [driver.span(4)])
    assert again == drawn[3:]


def test_draws_depend_on_seed_and_choice_not_on_the_batch(driver: Driver) -> None:
    tokens = prompt(12, 3)
    kinds = [
        SamplingParams(temperature=1.5, seed=1),
        SamplingParams(temperature=1.5, seed=2),
        SamplingParams(temperature=1.5, seed=1, choice=1),
        GREEDY,
        SamplingParams(temperature=1.5, top_p=0.8, seed=-(2**62)),
    ]

    def alone(key: int, sampling: SamplingParams) -> list[int]:
        drawn = driver.tokens([driver.new(key, tokens, sampling)], [driver.span(key)])
        for _ in range(5):
            drawn += driver.tokens([], [driver.span(key)])
        return drawn

    expected = [alone(10 + index, sampling) for index, sampling in enumerate(kinds)]
    assert len({tuple(drawn) for drawn in expected}) == len(kinds)
    keys = [20 + index for index in range(len(kinds))]
    new = [driver.new(key, tokens, sampling) for key, sampling in zip(keys, kinds, strict=True)]
    steps = [driver.tokens(new, [driver.span(key) for key in keys])]
    steps += [driver.tokens([], [driver.span(key) for key in keys]) for _ in range(5)]
    assert [list(drawn) for drawn in zip(*steps, strict=True)] == expected


def test_more_sequences_than_rows_to_begin_with(driver: Driver) -> None:
    keys = list(range(100, 140))
    new = [driver.new(key, [key]) for key in keys]
    assert len(driver.tokens(new, [driver.span(key) for key in keys])) == len(keys)
    assert len(driver.tokens([], [driver.span(key) for key in keys])) == len(keys)


def test_plans_that_cannot_be_obeyed_are_refused(smollm2_runner: ModelRunner) -> None:
    forward = smollm2_runner.forward
    with pytest.raises(ValueError, match="sequence 7 is not held"):
        forward(StepPlan(0, [], [Span(7, 0, 1, [[1]], True)], []))
    with pytest.raises(ValueError, match="too few blocks for token 16"):
        forward(StepPlan(0, [NewSequence(8, [1] * 17, GREEDY)], [Span(8, 0, 17, [[1]], True)], []))
    with pytest.raises(ValueError, match="already held"):
        forward(StepPlan(0, [NewSequence(8, [1], GREEDY)], [], []))
    smollm2_runner.forget(8)


def test_sizes_that_cannot_work_are_refused(smollm2_path: Path) -> None:
    from worker.execution.model_runner import ModelRunner

    for wrong, message in (
        ({"block_size": 24}, "a multiple of 16"),
        ({"max_model_len": 8193}, "1 to 8192"),
        ({"device": "tpu"}, "tpu"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            ModelRunner(EngineConfig(**{"model_path": str(smollm2_path), "device": "cpu", **wrong}))  # type: ignore[arg-type]


def test_what_the_engine_must_know(smollm2_runner: ModelRunner) -> None:
    assert smollm2_runner.num_blocks == 512
    assert smollm2_runner.block_size == 16
    assert smollm2_runner.max_model_len == 8192
    assert smollm2_runner.vocab_size == 49_152
    assert 2 in smollm2_runner.eos_token_ids
