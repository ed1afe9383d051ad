from __future__ import annotations

import math

import pytest
import torch

from kernels.logprobs import LEAST_LOGPROB, logprobs_of

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("rows", "vocab", "count"), [(5, 40, 4), (7, 50_000, 20), (1, 3, 3), (3, 10, 50)])
def test_against_log_softmax_in_float64(rows: int, vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    token_ids = torch.randint(0, vocab, (rows,), generator=generator)
    token_ids[0] = logits[0].argmax()
    exact = torch.log_softmax(logits.double(), dim=-1)
    found = logprobs_of(logits, token_ids, count)
    torch.testing.assert_close(found.logprobs.double(), exact.gather(1, token_ids[:, None])[:, 0], atol=1e-5, rtol=0)
    order = logits.argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.top_ids, order[:, :count])
    torch.testing.assert_close(found.top_logprobs.double(), exact.gather(1, order[:, :count]), atol=1e-5, rtol=0)
    for row in range(rows):
        assert order[row, int(found.ranks[row]) - 1] == token_ids[row]
    assert int(found.ranks[0]) == 1


def test_no_likeliest_are_given_where_none_are_wanted() -> None:
    found = logprobs_of(torch.zeros(2, 4), torch.tensor([3, 0]), 0)
    assert found.top_ids.shape == found.top_logprobs.shape == (2, 0)
    assert found.ranks.tolist() == [4, 1]
    assert found.logprobs.tolist() == pytest.approx([math.log(0.25)] * 2)


def test_impossible_tokens_have_a_number_too() -> None:
    logits = torch.tensor([[0.0, -INF, NAN], [NAN, NAN, NAN], [INF, 0.0, 0.0]])
    found = logprobs_of(logits, torch.tensor([1, 0, 0]), 2)
    assert found.logprobs.tolist() == [LEAST_LOGPROB, LEAST_LOGPROB, 0.0]
    assert found.top_logprobs.tolist() == [[0.0, LEAST_LOGPROB], [LEAST_LOGPROB] * 2, [0.0, LEAST_LOGPROB]]
    assert found.top_ids.tolist() == [[0, 1], [0, 1], [0, 1]]
