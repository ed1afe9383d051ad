from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.philox import uniform
from kernels.sampling import greedy, sample
from tests.kernels.sampling_reference import WAYS, Choice, by_way, drawn, frequencies, parameters, probabilities

INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with by_way(request.param):
        yield request.param


def test_greedy_takes_the_first_of_equals_and_never_nan() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [NAN, 1.0, 2.0], [NAN, NAN, NAN], [-INF, 0.0, NAN], [-INF] * 3])
    assert greedy(logits).tolist() == [1, 2, 0, 1, 0]
    assert greedy(logits, fallback=2).tolist() == [1, 2, 2, 1, 2]


def test_greedy_finds_the_largest_wherever_it_stands() -> None:
    for at in (0, 1, 5, 998, 999):
        logits = torch.linspace(-3, 3, 1000).roll(500).expand(3, -1).clone()
        logits[1, at] = 4.0
        logits[2] = -logits[1]
        assert greedy(logits).tolist() == [499, at, 500]
    assert greedy(torch.tensor([[2.0, 2.0, 1.0], [-5.0, -6.0, -5.0], [0.0, 0.0, 0.0]])).tolist() == [0, 0, 0]


choices = st.builds(
    Choice,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.3, 5.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-3, 0.1, 0.5, 1.0]),
)
logit_rows = st.lists(
    st.one_of(st.sampled_from([0.0, 1.0, 2.0, -INF, NAN]), st.floats(-8, 8, width=32)), min_size=10, max_size=10
)


@pytest.mark.parametrize("route", WAYS)
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(logit_rows, choices, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=5))
@example(rows=[([0.0] * 8 + [2.0, 4.0], Choice(0.1), 0.0)])
def test_draws_agree_with_the_reference(route: str, rows: list[tuple[list[float], Choice, float]]) -> None:
    """A mixed batch, row by row; where a border or a draw falls within rounding of another answer, either is right."""
    logits = torch.tensor([row for row, _, _ in rows])
    before = logits.clone()
    draws = parameters([choice for _, choice, _ in rows], [number for _, _, number in rows])
    with by_way(route):
        tokens = sample(logits, draws, fallback=7).tolist()
    assert torch.equal(logits.nan_to_num(nan=5e4), before.nan_to_num(nan=5e4))
    for row, (choice, number), token in zip(logits.tolist(), [r[1:] for r in rows], tokens, strict=True):
        allowed = set()
        for slack in (0.0, 1e-6, -1e-6):
            exact = probabilities(row, choice, slack)
            if not any(exact):
                allowed = {7}
                break
            allowed |= drawn(exact, number, 1e-6)
        assert token in allowed


def test_frequencies_follow_the_distribution(way: str) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 0.25, -3.0])
    for choice in (
        Choice(0.5),
        Choice(1.0),
        Choice(2.0, top_k=3),
        Choice(1.5, top_p=0.8),
        Choice(1.0, min_p=0.2),
        Choice(3.0, top_k=6, top_p=0.9, min_p=0.3),
    ):
        exact = torch.tensor(probabilities(logits.tolist(), choice), dtype=torch.float32)
        torch.testing.assert_close(frequencies(logits, choice, 800), exact, atol=2e-3, rtol=0)


def test_seeded_draws_pass_a_chi_square_test() -> None:
    """With the engine's own random numbers, over a few hundred tokens."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, generator=generator) * 2
    count = 20_000
    for choice in (Choice(1.0), Choice(0.8, top_p=0.95), Choice(1.2, top_k=40), Choice(1.0, min_p=0.05)):
        tokens = []
        for begin in range(0, count, 4000):
            numbers = uniform([11] * 4000, [0] * 4000, list(range(begin, begin + 4000))).tolist()
            tokens.append(sample(logits.expand(4000, -1), parameters([choice] * 4000, numbers)))
        seen = np.bincount(torch.cat(tokens).numpy(), minlength=300).astype(float)
        wanted = np.array(probabilities(logits.tolist(), choice)) * count
        assert not seen[wanted == 0].any()
        # Rare tokens share a bin, so that the statistic follows chi-square.
        rare = wanted < 10
        bins = [*zip(seen[~rare], wanted[~rare], strict=True), (seen[rare].sum(), wanted[rare].sum())]
        bins = [(got, expected) for got, expected in bins if expected > 0]
        statistic, degrees = sum((got - want) ** 2 / want for got, want in bins), len(bins) - 1
        # Wilson-Hilferty: chi-square's cube root is nearly normal. 3.3 standard deviations: p = 0.0005.
        deviation = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
        assert abs(deviation) < 3.3, choice


def test_top_p_keeps_the_smallest_set_that_reaches_it(way: str) -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    got = frequencies(logits, Choice(top_p=0.7), 600)
    torch.testing.assert_close(got, torch.tensor([0, 0.625, 0, 0.375]), atol=2e-3, rtol=0)
    assert frequencies(logits, Choice(top_p=0.01), 100).tolist() == [0, 1, 0, 0]


def test_a_set_that_reaches_top_p_exactly_takes_no_more(way: str) -> None:
    """Equal weights, whose sums meet ``top_p`` to the bit; of equals the lower ids come first."""
    logits = torch.tensor([0.0, -INF, 0.0, 0.0, 0.0, -INF, -INF])
    for top_p, kept in ((0.25, [1, 0, 0, 0, 0]), (0.5, [0.5, 0, 0.5, 0, 0]), (0.75, [1 / 3, 0, 1 / 3, 1 / 3, 0])):
        got = frequencies(logits, Choice(top_p=top_p), 600)
        torch.testing.assert_close(got, torch.tensor([*kept, 0.0, 0.0]), atol=2e-3, rtol=0)


def test_top_k_keeps_exactly_so_many_of_equals(way: str) -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    for count, kept in ((1, {1}), (2, {1, 4}), (3, {0, 1, 4}), (5, {0, 1, 2, 3, 4}), (8, set(range(8)))):
        got = frequencies(logits, Choice(50.0, top_k=count), 500)
        assert set(got.nonzero().squeeze(1).tolist()) == kept
    assert bool((frequencies(logits, Choice(50.0, top_k=9), 500) > 0).all())


def test_top_k_goes_by_the_logits_not_by_what_temperature_leaves_of_them(way: str) -> None:
    logits = torch.tensor([1.0, 1.0 + 2**-23, 1.0, 1.0])
    assert frequencies(logits, Choice(1e30, top_k=1), 10).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 3.0, 20.0])
def test_every_way_draws_the_same_token(spread: float) -> None:
    """From flat rows, whose nucleus is nearly everything, to steep ones."""
    generator = torch.Generator().manual_seed(int(spread * 100))
    logits = torch.randn(24, 3001, generator=generator) * spread
    logits[::5] = logits[::5].round()  # many equals
    options = [
        Choice(1.0, 0, 0.9),
        Choice(0.7, 50),
        Choice(1.5, 2000, 0.99),
        Choice(1.0, 0, 0.5, 0.01),
        Choice(1.0, 300, 0.8),
        Choice(1.0),
    ]
    choices = [options[row % len(options)] for row in range(24)]
    numbers = torch.rand(24, generator=generator, dtype=torch.float64).tolist()
    draws = parameters(choices, numbers)
    tokens = sample(logits, draws).tolist()
    for way in WAYS[1:]:
        with by_way(way):
            assert sample(logits, draws).tolist() == tokens
    # And not by all being the likeliest.
    if spread < 5:
        assert tokens != logits.argmax(dim=-1).tolist()


def test_rows_are_drawn_alike_alone_and_in_any_company() -> None:
    """Shapes that the vector units do not divide, so that rows begin anywhere."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(16, 1003, generator=generator)
    options = [Choice(0.2), Choice(1.0, 0, 0.9), Choice(5.0, 0, 0.5), Choice(1.0, 20), Choice(2.0, 0, 0.97, 0.1)]
    choices = [options[row % 5] for row in range(16)]
    numbers = torch.rand(16, generator=generator, dtype=torch.float64).tolist()
    together = sample(logits, parameters(choices, numbers)).tolist()
    for seed in range(30):
        some = np.random.default_rng(seed).permutation(16)[: 1 + seed % 16].tolist()
        draws = parameters([choices[row] for row in some], [numbers[row] for row in some])
        assert sample(logits[some], draws).tolist() == [together[row] for row in some]


def test_weights_do_not_depend_on_where_a_row_lies() -> None:
    """The exponential is the one operation that could: vector units and what is left over at the end."""
    values = -torch.rand(5003, generator=torch.Generator().manual_seed(0)) * 30
    whole = torch.exp(values)
    for begin in range(1, 40):
        assert torch.equal(torch.exp(values[begin : begin + 1001]), whole[begin : begin + 1001])
    assert torch.equal(torch.stack([torch.exp(values[at : at + 1])[0] for at in range(300)]), whole[:300])


def test_extreme_logits_draw_something_possible(way: str) -> None:
    rows = [[NAN, 0.0, -INF], [-INF, -INF, 3.0], [1e30, -1e30, 0.0], [-INF, INF, 1e38], [-3e38, -INF, NAN]]
    for choice in (Choice(1e-3), Choice(1e-3, top_p=0.5), Choice(1e-3, top_k=2), Choice(1e-3, min_p=1.0)):
        for number in (0.0, 1 - 1e-16):
            draws = parameters([choice] * 5, [number] * 5)
            assert sample(torch.tensor(rows), draws, 9).tolist() == [1, 2, 0, 1, 0]


@pytest.mark.parametrize("choice", [Choice(), Choice(top_p=0.5), Choice(top_k=2), Choice(min_p=0.5)])
def test_a_row_without_any_possible_token_gives_the_fallback(way: str, choice: Choice) -> None:
    logits = torch.tensor([[NAN] * 8, [-INF] * 8, [0.0] + [-INF] * 7])
    assert sample(logits, parameters([choice] * 3, [0.7] * 3), 5).tolist() == [5, 5, 0]


def test_temperatures_beyond_fp32_are_the_nearest_within() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9999, NAN]] * 4)
    numbers = [0.0, 0.3, 0.6, 1 - 1e-16]
    for top_p in (1.0, 0.9):
        for tiny in (1e-300, 1e-45, 1e-38):
            assert sample(logits, parameters([Choice(tiny, 0, top_p)] * 4, numbers)).tolist() == [1] * 4
        assert sample(logits, parameters([Choice(INF)] * 4, numbers)).tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("choice", "warper", "argument"),
    [
        (Choice(50.0, top_k=7), "TopKLogitsWarper", 7),
        (Choice(1.0, top_p=0.6), "TopPLogitsWarper", 0.6),
        (Choice(1.0, top_p=0.95), "TopPLogitsWarper", 0.95),
        (Choice(1.0, min_p=0.07), "MinPLogitsWarper", 0.07),
    ],
)
def test_the_tokens_that_survive_are_those_of_transformers(
    way: str, choice: Choice, warper: str, argument: Any
) -> None:
    import transformers.generation.logits_process as processors

    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(8)) * 1.5
    survivors = getattr(processors, warper)(argument)(None, logits) > -INF
    for row, wanted in zip(logits, survivors, strict=True):
        assert torch.equal(frequencies(row, choice, 800) > 0, wanted)
