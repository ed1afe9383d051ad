from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.execution.sampler_reference import Row, draw, possible_draws
from worker.engine.plan import SamplingParams, TokenMasks
from worker.execution.sampled_row import SampledRow, SequenceSampling
from worker.execution.sampler import Sampler

INF, NAN = float("inf"), float("nan")
VOCAB = 37

token = st.integers(0, VOCAB - 1)
# No two logits nearer than rounding, so that the order of tokens is beyond doubt; and equals, where it goes by id.
logit = st.one_of(st.integers(-900, 900).map(lambda n: n / 100 + 0.001), st.sampled_from([0.0, -INF, NAN]))


def maybe(name: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The parameter in a third of the cases."""
    return st.one_of(st.just({}), st.just({}), values.map(lambda value: {name: value}))


some_params = st.tuples(
    st.sampled_from([{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 3.0}]),
    maybe("top_k", st.integers(1, VOCAB + 3)),
    maybe("top_p", st.sampled_from([0.2, 0.8, 0.97])),
    maybe("min_p", st.sampled_from([0.01, 0.2, 0.9])),
    maybe("repetition_penalty", st.sampled_from([0.8, 1.25, 2.0])),
    maybe("presence_penalty", st.sampled_from([-1.013, 0.517])),
    maybe("frequency_penalty", st.sampled_from([-0.311, 0.237])),
    maybe("logit_bias", st.dictionaries(token, st.sampled_from([-100.0, -1.5, 2.25, 100.0]), min_size=1, max_size=4)),
    maybe("allowed_token_ids", st.lists(token, min_size=1, max_size=6)),
    maybe("min_tokens", st.integers(1, 8)),
    maybe("stop_token_ids", st.lists(token, min_size=1, max_size=3)),
    maybe("logprobs", st.integers(0, 5)),
    st.fixed_dictionaries({"seed": st.integers(-5, 2**63), "choice": st.integers(0, 3)}),
).map(lambda parts: SamplingParams(**{name: value for part in parts for name, value in part.items()}))
some_row = st.builds(
    Row,
    logits=st.lists(logit, min_size=VOCAB, max_size=VOCAB),
    params=some_params,
    held=st.lists(token, min_size=4, max_size=12),
    num_prompt=st.integers(1, 4),
    grammar=st.one_of(st.none(), st.none(), st.sets(token, max_size=10)),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(some_row, min_size=1, max_size=6))
def test_mixed_batches_agree_with_the_reference(rows: list[Row]) -> None:
    tokens = draw(rows, eos_token_ids=(9, 3)).tokens.tolist()
    for row, drawn_ in zip(rows, tokens, strict=True):
        assert drawn_ in possible_draws(row, fallback=9)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(some_row, min_size=2, max_size=8), seed=st.integers(0, 1000))
def test_a_row_draws_the_same_in_any_company(rows: list[Row], seed: int) -> None:
    together = draw(rows)
    tokens, logprobs = together.tokens.tolist(), together.logprobs()
    order = np.random.default_rng(seed).permutation(len(rows))
    for some in (order, order[: len(rows) // 2], order[:1]):
        part = draw([rows[row] for row in some])
        assert part.tokens.tolist() == [tokens[row] for row in some]
        assert part.logprobs() == {place: logprobs[row] for place, row in enumerate(some) if row in logprobs}


def test_wide_rows_of_every_kind_draw_the_same_in_any_company() -> None:
    """Over a vocabulary that is not a multiple of anything, where sums and slices could differ."""
    generator = torch.Generator().manual_seed(4)
    vocab = 30_011
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_p": 0.97},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 3000, "min_p": 1e-4},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.9, "presence_penalty": 0.5, "logit_bias": {7: 4.0}, "min_tokens": 50, "stop_token_ids": [3]},
        {"temperature": 1.0, "allowed_token_ids": list(range(0, vocab, 7))},
    ]
    rows = []
    for index in range(24):
        logits = (torch.randn(vocab, generator=generator) * (1 + index % 3)).tolist()
        held = torch.randint(0, vocab, (10 + 5 * index,), generator=generator).tolist()
        params = SamplingParams(**kinds[index % len(kinds)], seed=index)  # type: ignore[arg-type]
        grammar = set(range(index, vocab, 11)) if index % 5 == 4 else None
        rows.append(Row(logits, params, held, 5, grammar))
    tokens = draw(rows).tokens.tolist()
    assert len(set(tokens)) > 16
    for seed in range(4):
        some = np.random.default_rng(seed).permutation(24)[: 1 + 5 * seed].tolist()
        assert draw([rows[row] for row in some]).tokens.tolist() == [tokens[row] for row in some]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-45, 1e-39])
def test_temperatures_too_small_to_divide_by_are_greedy(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 1000)
    logits[3, 5] = logits[3, 900] = 50.0
    rows = [
        Row(row, SamplingParams(temperature=temperature, top_p=0.9, seed=seed))
        for seed, row in enumerate(logits.tolist())
    ]
    tokens = draw(rows).tokens.tolist()
    assert tokens == logits.argmax(dim=-1).tolist()
    assert tokens[3] == 5


def test_draws_are_named_by_seed_choice_and_position() -> None:
    logits = [0.0] * 1000
    base = Row(logits, SamplingParams(seed=1, choice=0), held=[0] * 6)
    others = [
        replace(base, params=SamplingParams(seed=2)),
        replace(base, params=SamplingParams(seed=1, choice=1)),
        replace(base, held=[0] * 7),
        # The same number, however much of what came before is prompt.
        replace(base, num_prompt=6, held=[5, 6, 7, 8, 9, 10]),
    ]
    tokens = draw([base, *others]).tokens.tolist()
    assert len(set(tokens[:4])) == 4
    assert tokens[4] == tokens[0]


def test_greedy_is_the_largest_after_bans_bias_and_penalties() -> None:
    logits = [1.0, 5.0, 4.0, 3.5, 0.0]

    def greedy(held: list[int] | None = None, num_prompt: int = 1, **params: Any) -> int:
        row = Row(logits, SamplingParams(temperature=0.0, **params), held or [4], num_prompt)
        return int(draw([row]).tokens[0])

    assert greedy() == 1
    assert greedy(logit_bias={2: 1.5}) == 2
    assert greedy(logit_bias={1: -100.0}) == 2
    assert greedy(allowed_token_ids=[0, 3]) == 3
    assert greedy([4, 1], repetition_penalty=1.3) == 2
    assert greedy([1, 4], repetition_penalty=1.3) == 2  # of the prompt too
    assert greedy([4, 1], presence_penalty=1.2) == 2
    assert greedy([1, 4], presence_penalty=1.2) == 1  # not of the prompt
    assert greedy([4, 1, 1, 2], frequency_penalty=0.8) == 3
    assert greedy([4, 1, 1, 2], presence_penalty=0.8) == 1


def test_stop_tokens_are_banned_until_min_tokens_are_there() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[1, 2])
    rows = [Row([1.0, 5.0, 4.0], params, [0] * (2 + output), 2) for output in range(5)]
    assert draw(rows).tokens.tolist() == [0, 0, 0, 1, 1]


def test_tokens_beyond_the_vocabulary_or_the_mask_are_never_drawn() -> None:
    logits = [0.0] * 70 + [50.0] * 10
    plain = Row(logits, SamplingParams(temperature=0.0))
    assert int(draw([plain]).tokens[0]) == 70
    assert draw([plain, replace(plain, params=SamplingParams())], vocab_size=70).tokens.max() < 70
    # The mask knows fewer tokens than the logits have.
    masked = replace(plain, grammar=set(range(60, 70)))
    assert int(draw([masked], vocab_size=70).tokens[0]) == 60


def test_masks_of_any_width_meet_the_allowed_tokens() -> None:
    logits = torch.zeros(1, 70)
    logits[0, 69], logits[0, 3] = 9.0, 8.0
    params = SamplingParams(temperature=0.0, allowed_token_ids=[3, 5, 69])
    row = SampledRow(SequenceSampling(params, 1), 1, 0)
    held = torch.zeros(1, 2, dtype=torch.int32)
    for words, drawn in ((1, 3), (3, 69), (5, 69)):
        masks = TokenMasks([0], np.full((1, words), -1, np.int32))
        assert int(Sampler(70, torch.device("cpu")).draw(logits, [row], held, masks).tokens[0]) == drawn


def test_a_mask_may_be_wider_or_narrower_than_the_vocabulary() -> None:
    logits = torch.arange(70.0).unsqueeze(0)
    params = SamplingParams(temperature=0.0, allowed_token_ids=[3, 40, 66])
    row = SampledRow(SequenceSampling(params, 1), 1, 0)
    sampler = Sampler(70, torch.device("cpu"))
    for words, wanted in ((5, 66), (3, 66), (2, 40), (1, 3)):
        mask = TokenMasks([0], np.full((1, words), -1, np.int32))
        assert sampler.draw(logits, [row], torch.zeros(1, 2, dtype=torch.int32), mask).tokens.tolist() == [wanted]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_nothing_can_be_drawn_from_draws_the_end_of_sequence(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    logits = [0.0, 1.0, 2.0, 3.0, 4.0]
    rows = [
        Row(logits, params, grammar=set()),
        Row(logits, SamplingParams(temperature=temperature, allowed_token_ids=[1]), grammar={2, 3}),
        Row(
            logits,
            SamplingParams(temperature=temperature, min_tokens=5, stop_token_ids=[3], allowed_token_ids=[3]),
        ),
        Row([NAN] * 5, params),
        Row([-INF] * 5, params),
        Row(logits, params, grammar={4}),
    ]
    assert draw(rows, eos_token_ids=(2, 3)).tokens.tolist() == [2, 2, 2, 2, 2, 4]
    assert draw(rows).tokens.tolist() == [0, 0, 0, 0, 0, 4]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = [1.0, 5.0, 4.0, 3.5, 0.0, 4.0]
    total = math.log(sum(map(math.exp, logits)))
    shaping = {"temperature": 0.0, "logit_bias": {0: 50.0}, "repetition_penalty": 2.0, "top_k": 1}
    rows = [
        Row(logits, SamplingParams(temperature=0.0)),
        Row(logits, SamplingParams(**shaping, logprobs=3), held=[1, 2]),  # type: ignore[arg-type]
        Row(logits, SamplingParams(temperature=0.0, logprobs=0), grammar={2, 5}),
        Row(logits, SamplingParams(temperature=0.0, logprobs=5)),
    ]
    draws = draw(rows)
    assert draws.tokens.tolist() == [1, 0, 2, 1]
    found = draws.logprobs()
    assert list(found) == [1, 2, 3]
    assert [(found[row].token_id, found[row].rank) for row in (1, 2, 3)] == [(0, 5), (2, 2), (1, 1)]
    assert [found[row].logprob for row in (1, 2, 3)] == pytest.approx([value - total for value in (1.0, 4.0, 5.0)])
    assert [found[row].top_ids for row in (1, 2, 3)] == [[1, 2, 5], [], [1, 2, 5, 3, 0]]
    assert found[3].top_logprobs == pytest.approx([value - total for value in (5.0, 4.0, 4.0, 3.5, 1.0)])


def test_no_logprobs_where_none_are_wanted() -> None:
    assert draw([Row([0.0, 1.0], SamplingParams())]).logprobs() == {}
