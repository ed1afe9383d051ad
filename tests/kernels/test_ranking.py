from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.ranking import _top_by_key, clean, ordered_bits, rank, top

INF, NAN = float("inf"), float("nan")
few_values = st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -1.0, 3.5, -INF, 3e38, 1e-45, -1e-45])


def order_of(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def test_clean_leaves_good_logits_and_mends_others() -> None:
    good = torch.tensor([[1.0, -INF], [0.5, 0.25]])
    values, peak = clean(good)
    assert values.data_ptr() == good.data_ptr()
    assert peak.tolist() == [[1.0], [0.5]]
    largest = torch.finfo(torch.float32).max
    values, peak = clean(torch.tensor([[NAN, 1.0], [INF, -INF], [NAN, NAN]]))
    assert values.tolist() == [[-INF, 1.0], [largest, -INF], [-INF, -INF]]
    assert peak.tolist() == [[1.0], [largest], [-INF]]
    assert clean(torch.ones(1, 2, dtype=torch.bfloat16))[0].dtype == torch.float32


def test_bits_compare_as_the_numbers_do() -> None:
    values = torch.tensor([-INF, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, 1.0000001, 3e38, INF])
    bits = ordered_bits(values)
    assert torch.equal(bits.unsqueeze(0) < bits.unsqueeze(1), values.unsqueeze(0) < values.unsqueeze(1))


@pytest.mark.parametrize("find", [top, _top_by_key], ids=["topk", "keys"])
@settings(max_examples=100, deadline=None)
@given(rows=st.lists(st.lists(few_values, min_size=9, max_size=9), min_size=1, max_size=4), count=st.integers(1, 9))
def test_top_and_rank_follow_the_order_where_values_are_equal(
    find: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]], rows: list[list[float]], count: int
) -> None:
    values = torch.tensor(rows)
    found, ids = find(values, count)
    assert ids.tolist() == [order_of(row)[:count] for row in values.tolist()]
    assert torch.equal(found, values.gather(1, ids))
    for token in range(9):
        wanted = [order_of(row).index(token) + 1 for row in values.tolist()]
        assert rank(values, torch.full((len(rows),), token)).tolist() == wanted


def test_top_of_a_wide_row_with_many_equals() -> None:
    values = torch.from_numpy(np.random.default_rng(0).integers(0, 50, (3, 5000)).astype(np.float32))
    for count in (1, 7, 300):
        _, ids = top(values, count)
        assert ids.tolist() == [order_of(row)[:count] for row in values.tolist()]
