"""What a step gives beside tokens, when it may be read, and what the runner keeps apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.worker.parity.checkpoints import Checkpoint, make, prompt
from worker.engine.config import EngineConfig
from worker.engine.plan import NewSequence, Pooling, SamplingParams, Span, StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from worker.execution.model_runner import ModelRunner

BLOCK = 16
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make("gqa", tmp_path_factory.mktemp("gqa"))


@pytest.fixture(scope="module")
def shared_runner(checkpoint: Checkpoint) -> ModelRunner:
    from worker.execution.model_runner import ModelRunner

    return ModelRunner(
        EngineConfig(
            model_path=str(checkpoint.path), device="cpu", threads=1, block_size=BLOCK, kv_cache_bytes=200 * 16_384
        )
    )


@pytest.fixture
def runner(shared_runner: ModelRunner) -> Iterator[ModelRunner]:
    yield shared_runner
    for key in range(20):
        shared_runner.forget(key)


def table(first: int, tokens: int) -> list[list[int]]:
    """Blocks from ``first`` on that hold so many tokens."""
    return [list(range(first, first - (-tokens // BLOCK)))]


def run(runner: ModelRunner, plan: StepPlan) -> StepResult:
    return runner.sample(runner.forward(plan)).result()


def chunks(key: int, length: int, sizes: list[int], first_block: int, *, sample: bool) -> list[Span]:
    """The spans of a prompt; the last takes what is left. All blocks come with the first."""
    spans, start = [], 0
    for size in [*sizes, length - sum(sizes)]:
        end = start + size
        spans.append(
            Span(key, start, size, table(first_block, length + 1) if start == 0 else [], sample and end == length)
        )
        start = end
    return spans


def mixed_plans() -> list[StepPlan]:
    """Rows change owners while draws are unread: A (1) and the embedding (3) end, C (4) and D (5) take their places."""
    drawn = SamplingParams(temperature=1.2, seed=5, logprobs=3)
    penalised = SamplingParams(temperature=0.9, seed=6, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=1)
    scored = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=0)
    a, b, e = prompt(20, 1), prompt(30, 2), prompt(12, 3)
    c, d = prompt(25, 4), prompt(40, 5)
    return [
        StepPlan(
            1,
            [NewSequence(1, a, drawn, 20), NewSequence(2, b, penalised, 30), NewSequence(3, e, GREEDY, 12, "mean")],
            [
                Span(1, 0, 20, table(1, 24), True),
                Span(2, 0, 30, table(10, 48), True),
                Span(3, 0, 12, table(20, 12), False),
            ],
            [],
        ),
        StepPlan(2, [], [Span(1, 20, 1, [], True), Span(2, 30, 1, [], True)], []),
        StepPlan(
            3,
            [NewSequence(4, c, scored, 25), NewSequence(5, d, drawn, 40)],
            [Span(2, 31, 1, [], True), Span(4, 0, 25, table(1, 30), True), Span(5, 0, 30, table(20, 42), False)],
            [1, 3],
        ),
        StepPlan(4, [], [Span(2, 32, 1, [], True), Span(4, 25, 1, [], True), Span(5, 30, 10, [], True)], []),
        StepPlan(5, [], [Span(2, 33, 1, [], True), Span(5, 40, 1, [], True)], [4]),
    ]


@pytest.mark.parametrize("depth", [2, 5])
def test_draws_read_late_are_those_read_at_once(runner: ModelRunner, depth: int) -> None:
    """forward(N + 1) is submitted before anyone knows the tokens of step N: they go from draw to step on the device,
    and nothing that an unread step gave is written over."""
    expected, logits = [], []
    for plan in mixed_plans():
        handle = runner.forward(plan)
        assert handle.logits is not None
        logits.append(handle.logits.clone())
        expected.append(runner.sample(handle).result())
    for key in range(1, 6):
        runner.forget(key)

    handles, drawn, read = [], [], []
    for plan in mixed_plans():
        handles.append(runner.forward(plan))
        drawn.append(runner.sample(handles[-1]))
        if len(drawn) - len(read) == depth:
            read.append(drawn[len(read)].result())
    read += [draw.result() for draw in drawn[len(read) :]]
    assert read == expected
    assert all(torch.equal(handle.logits, before) for handle, before in zip(handles, logits, strict=True))
    # The plans are such that everything there is was given.
    assert [len(result.tokens) for result in read] == [2, 2, 2, 3, 2]
    assert [sorted(result.logprobs) for result in read] == [[1, 2], [1, 2], [2, 4], [2, 4, 5], [2, 5]]
    assert [sorted(result.prompt_logprobs) for result in read] == [[], [], [4], [], []]
    assert [sorted(result.embeddings) for result in read] == [[3], [], [], [], []]


def test_tokens_and_logprobs_stand_in_the_order_of_the_spans(runner: ModelRunner, checkpoint: Checkpoint) -> None:
    """Also where spans that sample stand among those that do not."""
    texts = {key: prompt(20 + key, key) for key in (6, 7, 8)}
    asked = SamplingParams(temperature=0.0, logprobs=1)
    new = [NewSequence(key, text, asked if key != 7 else GREEDY, len(text)) for key, text in texts.items()]
    spans = [
        Span(6, 0, 26, table(1, 27), True),
        Span(8, 0, 20, table(5, 29), False),
        Span(7, 0, 27, table(9, 28), True),
    ]
    result = run(runner, StepPlan(0, new, spans, []))
    best = [int(checkpoint.logits(texts[key])[-1].argmax()) for key in (6, 7)]
    assert result.tokens == best
    assert list(result.logprobs) == [6]
    assert result.logprobs[6].token_id == best[0]
    result = run(runner, StepPlan(1, [], [Span(8, 20, 8, [], True)], []))
    assert result.logprobs[8].token_id == result.tokens[0] == int(checkpoint.logits(texts[8])[-1].argmax())


def expected_prompt_logprobs(checkpoint: Checkpoint, tokens: list[int], top: int) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(checkpoint.logits(tokens), dim=-1)
    found = []
    for row, token in zip(logprobs, tokens[1:], strict=False):
        order = row.argsort(descending=True).tolist()
        best = order[:top]
        found.append(TokenLogprobs(token, float(row[token]), order.index(token) + 1, best, row[best].tolist()))
    return found


def assert_close(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    assert [(one.token_id, one.rank, one.top_ids) for one in found] == [
        (one.token_id, one.rank, one.top_ids) for one in expected
    ]
    ours = torch.tensor([[one.logprob, *one.top_logprobs] for one in found])
    theirs = torch.tensor([[one.logprob, *one.top_logprobs] for one in expected])
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize("sizes", [[], [7, 1, 150], [128, 129]], ids=str)
def test_prompt_logprobs_equal_transformers(runner: ModelRunner, checkpoint: Checkpoint, sizes: list[int]) -> None:
    """In chunks of any size, longer than one slice too; beside a sequence that asks for none."""
    tokens, other = prompt(300, 11), prompt(40, 12)
    asked = SamplingParams(temperature=0.0, prompt_logprobs=4)
    new = [NewSequence(1, tokens, asked, 300), NewSequence(2, other, GREEDY, 40)]
    spans = chunks(1, 300, sizes, 1, sample=True)
    found = []
    for step, span in enumerate(spans):
        beside = [Span(2, 0, 40, table(60, 41), True) if step == 0 else Span(2, 39 + step, 1, [], True)]
        result = run(runner, StepPlan(step, new if step == 0 else [], [*beside, span], []))
        assert list(result.prompt_logprobs) == [1]
        known = min(span.start + span.count, 299) - span.start
        assert len(result.prompt_logprobs[1]) == known
        found += result.prompt_logprobs[1]
    assert_close(found, expected_prompt_logprobs(checkpoint, tokens, 4))
    after = run(runner, StepPlan(9, [], [Span(1, 300, 1, [], True)], []))
    assert after.prompt_logprobs == {}


def test_prompt_logprobs_end_with_the_prompt_when_a_sequence_comes_back(
    runner: ModelRunner, checkpoint: Checkpoint
) -> None:
    """After preemption what was generated stands among the known tokens, and is none of the prompt."""
    tokens = prompt(60, 13)
    again = NewSequence(1, tokens, SamplingParams(temperature=0.0, prompt_logprobs=0), 50)
    first = run(runner, StepPlan(0, [again], [Span(1, 0, 45, table(1, 61), False)], []))
    second = run(runner, StepPlan(1, [], [Span(1, 45, 15, [], True)], []))
    found = first.prompt_logprobs[1] + second.prompt_logprobs[1]
    assert_close(found, expected_prompt_logprobs(checkpoint, tokens[:50], 0))
    assert [one.token_id for one in found] == tokens[1:50]


def test_a_prompt_of_one_token_has_no_logprobs(runner: ModelRunner) -> None:
    new = NewSequence(1, [5], SamplingParams(temperature=0.0, prompt_logprobs=3), 1)
    assert run(runner, StepPlan(0, [new], [Span(1, 0, 1, table(1, 2), True)], [])).prompt_logprobs == {}


def pooled(hidden: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    return hidden.mean(dim=0) if pooling == "mean" else hidden[-1]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("sizes", [[], [1, 30, 64], [199]], ids=str)
def test_embeddings_equal_transformers(
    runner: ModelRunner, checkpoint: Checkpoint, pooling: Pooling, sizes: list[int]
) -> None:
    tokens = prompt(200, 21)
    new = NewSequence(1, tokens, GREEDY, 200, pooling)
    vectors = []
    for step, span in enumerate(chunks(1, 200, sizes, 1, sample=False)):
        result = run(runner, StepPlan(step, [new] if step == 0 else [], [span], []))
        assert result.tokens == []
        vectors.append(result.embeddings)
    assert vectors[:-1] == [{}] * len(sizes)
    with torch.inference_mode():
        hidden = checkpoint.model.model(torch.tensor([tokens])).last_hidden_state[0]
    torch.testing.assert_close(torch.tensor(vectors[-1][1]), pooled(hidden, pooling), atol=1e-4, rtol=0)


def test_embeddings_of_many_in_one_step(runner: ModelRunner, checkpoint: Checkpoint) -> None:
    """Each gets its own, beside a text that is generated."""
    texts = {key: prompt(10 * key, key) for key in (1, 2, 3, 4)}
    poolings: dict[int, Pooling | None] = {1: "mean", 2: None, 3: "last", 4: "mean"}
    new = [NewSequence(key, text, GREEDY, len(text), poolings[key]) for key, text in texts.items()]
    spans = [Span(key, 0, len(text), table(10 * key, len(text)), key == 2) for key, text in texts.items()]
    result = run(runner, StepPlan(0, new, spans, []))
    assert result.tokens == [int(checkpoint.logits(texts[2])[-1].argmax())]
    assert sorted(result.embeddings) == [1, 3, 4]
    for key, vector in result.embeddings.items():
        pooling = poolings[key]
        assert pooling is not None
        with torch.inference_mode():
            hidden = checkpoint.model.model(torch.tensor([texts[key]])).last_hidden_state[0]
        torch.testing.assert_close(torch.tensor(vector), pooled(hidden, pooling), atol=1e-4, rtol=0)


def test_a_mean_begins_at_the_first_token(runner: ModelRunner) -> None:
    new = NewSequence(1, prompt(20, 1), GREEDY, 20, "mean")
    with pytest.raises(ValueError, match="sequence 1 pools a mean"):
        runner.forward(StepPlan(0, [new], [Span(1, 16, 4, table(1, 20), False)], []))


def test_a_key_that_is_used_again_begins_anew(runner: ModelRunner) -> None:
    """Nothing of a preempted embedding's first half is left when it is computed again."""
    tokens = prompt(40, 31)
    new = NewSequence(1, tokens, GREEDY, 40, "mean")
    whole = run(runner, StepPlan(0, [new], [Span(1, 0, 40, table(1, 40), False)], [])).embeddings
    run(runner, StepPlan(1, [new], [Span(1, 0, 25, table(1, 40), False)], [1]))
    again = run(runner, StepPlan(2, [new], [Span(1, 0, 40, table(1, 40), False)], [1])).embeddings
    assert again == whole
    # The same key for a text: no vector comes any more.
    text = NewSequence(1, tokens, GREEDY, 40)
    assert run(runner, StepPlan(3, [text], [Span(1, 0, 40, table(1, 41), True)], [1])).embeddings == {}


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_of_a_real_model(smollm2_runner: ModelRunner, reference: Any, pooling: Pooling) -> None:
    tokens = torch.randint(100, 49_000, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    new = NewSequence(900, tokens, GREEDY, 90, pooling)
    run(smollm2_runner, StepPlan(0, [new], [Span(900, 0, 50, table(1, 90), False)], []))
    result = run(smollm2_runner, StepPlan(1, [], [Span(900, 50, 40, [], False)], []))
    smollm2_runner.forget(900)
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([tokens])).last_hidden_state[0]
    assert len(result.embeddings[900]) == smollm2_runner.hidden_size
    torch.testing.assert_close(torch.tensor(result.embeddings[900]), pooled(hidden, pooling), atol=1e-3, rtol=0)
