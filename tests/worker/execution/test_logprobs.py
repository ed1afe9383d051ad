from __future__ import annotations

import pytest
import torch

from worker.execution.logprobs import PendingLogprobs, prompt_logprobs


def test_each_position_tells_of_the_token_that_follows() -> None:
    logits = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    following = torch.tensor([3, 0, 19, 7, 7])
    exact = torch.log_softmax(logits.double(), dim=-1)
    records = prompt_logprobs(logits, following, 2)
    for row, (token, record) in enumerate(zip(following.tolist(), records, strict=True)):
        assert record.token_id == token
        assert record.logprob == pytest.approx(float(exact[row, token]), abs=1e-5)
        assert record.rank == 1 + int((exact[row] > exact[row, token]).sum())
        values, ids = exact[row].topk(2)
        assert record.top_ids == ids.tolist()
        assert record.top_logprobs == pytest.approx(values.tolist(), abs=1e-5)


def test_rows_get_as_many_of_the_likeliest_as_each_wants() -> None:
    logits = torch.arange(12.0).expand(3, -1)
    records = PendingLogprobs(logits, torch.tensor([0, 1, 2]), [0, 3, 1]).read()
    assert [record.top_ids for record in records] == [[], [11, 10, 9], [11]]
    assert [record.rank for record in records] == [12, 11, 10]
    assert [len(record.top_logprobs) for record in records] == [0, 3, 1]
