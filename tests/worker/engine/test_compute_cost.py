import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.compute_cost import CostModel, split


@given(st.integers(0, 10**9), st.lists(st.integers(1, 10**7), min_size=1, max_size=50))
def test_the_parts_add_up_and_each_is_within_one_of_its_share(total: int, weights: list[int]) -> None:
    parts = split(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        exact = total * weight
        assert part * sum(weights) - sum(weights) < exact < part * sum(weights) + sum(weights)


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [(10, [1, 1, 1], [4, 3, 3]), (10, [6, 3, 1], [6, 3, 1]), (7, [5, 5, 10], [2, 2, 3]), (0, [3, 4], [0, 0])],
)
def test_what_is_left_goes_to_the_largest_remainders(total: int, weights: list[int], parts: list[int]) -> None:
    assert split(total, weights) == parts


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 4096))
def test_a_span_costs_what_its_pieces_cost(a: int, b: int, c: int, hidden_size: int) -> None:
    start, middle, end = sorted((a, b, c))
    model = CostModel(hidden_size)
    assert model.units(start, end) == model.units(start, middle) + model.units(middle, end)
    assert model.units(start, start + 1) == model.dense + start + 1


def test_attention_over_six_hidden_sizes_costs_as_much_as_the_rest() -> None:
    model = CostModel(100)
    assert model.units(600, 601) == 2 * model.units(0, 1) - 1
