from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.shaping import PenalisedRows, Penalties, add_bias, allow, ban

INF = float("inf")
CPU = torch.device("cpu")


def bits_of(allowed: set[int], vocab: int) -> torch.Tensor:
    words = [0] * -(-vocab // 32)
    for token in allowed:
        words[token // 32] |= 1 << (token % 32)
    return torch.tensor(np.array(words, np.uint32).view(np.int32))


@pytest.mark.parametrize("vocab", [31, 32, 33, 64, 70, 1000])
def test_only_the_named_tokens_of_the_named_rows_stay(vocab: int) -> None:
    allowed = [{0, 5, 30}, {vocab - 1}, set(range(0, vocab, 3)), set()]
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    before = logits.clone()
    rows = torch.tensor([4, 0, 1, 3])
    allow(logits, rows, torch.stack([bits_of(tokens, vocab) for tokens in allowed]))
    for row, tokens in zip(rows.tolist(), allowed, strict=True):
        for token in range(vocab):
            assert logits[row, token] == (before[row, token] if token in tokens else -INF)
    assert torch.equal(logits[[2, 5]], before[[2, 5]])


def test_tokens_beyond_the_bits_are_banned_and_bits_beyond_the_tokens_mean_nothing() -> None:
    wide, narrow = torch.zeros(1, 100), torch.zeros(1, 40)
    every = torch.full((1, 2), -1, dtype=torch.int32)
    for logits in (wide, narrow):
        allow(logits, torch.tensor([0]), every)
    assert wide[0].tolist() == [0.0] * 64 + [-INF] * 36
    assert narrow[0].tolist() == [0.0] * 40


def test_bans_and_bias_touch_what_they_name() -> None:
    logits = torch.zeros(3, 4)
    ban(logits, torch.tensor([0, 0, 2]), torch.tensor([1, 3, 0]))
    add_bias(logits, torch.tensor([0, 1, 1]), torch.tensor([1, 2, 0]), torch.tensor([5.0, -1.5, 2.0]))
    assert logits.tolist() == [[0, -INF, 0, -INF], [2.0, 0, -1.5, 0], [-INF, 0, 0, 0]]


def penalise(penalties: Penalties, logits: torch.Tensor, held: torch.Tensor, rows: list[dict[str, Any]]) -> None:
    """``rows``: what each penalised row has, by the names of ``PenalisedRows``."""

    def column(name: str, kind: type[np.generic]) -> Any:
        return np.array([row[name] for row in rows], kind)

    penalties.apply(
        logits,
        held,
        PenalisedRows(
            *(column(name, np.int64) for name in ("rows", "held_rows", "lengths", "prompts")),
            *(column(name, np.float32) for name in ("repetition", "presence", "frequency")),
        ),
    )


penalised = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.integers(0, 11), min_size=1, max_size=20),
        "share": st.floats(0, 1),
        "repetition": st.sampled_from([1.0, 1.3, 0.5, 2.0]),
        "presence": st.sampled_from([0.0, 0.7, -2.0]),
        "frequency": st.sampled_from([0.0, 0.2, -0.5]),
    }
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(penalised, min_size=1, max_size=4), seed=st.integers(0, 100))
def test_penalties_agree_with_counting_by_hand(rows: list[dict[str, Any]], seed: int) -> None:
    """Ragged histories, rows in any order, and twice with the same counts."""
    vocab = 12
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows) + 2, generator=generator).tolist()
    held = torch.full((len(order), 25), 3, dtype=torch.int32)  # beyond a row's length: what nobody may count
    for index, row in enumerate(rows):
        tokens = row["tokens"]
        row |= {
            "rows": order[index],
            "held_rows": order[-1 - index],
            "lengths": len(tokens),
            "prompts": round(row["share"] * len(tokens)),
        }
        held[row["held_rows"], : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    logits = torch.randn(len(order), vocab, generator=generator) * 3
    wanted = logits.double().tolist()
    for row in rows:
        values, output = wanted[row["rows"]], row["tokens"][row["prompts"] :]
        for token in set(row["tokens"]):
            value, factor = values[token], row["repetition"]
            value = value / factor if value > 0 else value * factor
            count = output.count(token)
            values[token] = value - count * row["frequency"] - (count > 0) * row["presence"]
    penalties = Penalties(CPU)
    for _ in range(2):
        got = logits.clone()
        penalise(penalties, got, held, rows)
        torch.testing.assert_close(got.double(), torch.tensor(wanted, dtype=torch.float64), atol=1e-5, rtol=1e-5)


def test_repetition_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(2)
    held = torch.randint(0, 50, (3, 40), generator=generator, dtype=torch.int32)
    logits = torch.randn(3, 50, generator=generator)
    wanted = RepetitionPenaltyLogitsProcessor(1.4)(held.long(), logits.clone())
    settings_ = {"lengths": 40, "prompts": 10, "repetition": 1.4, "presence": 0.0, "frequency": 0.0}
    penalise(Penalties(CPU), logits, held, [{"rows": row, "held_rows": row} | settings_ for row in range(3)])
    torch.testing.assert_close(logits, wanted)


def test_many_rows_are_counted_each_for_itself() -> None:
    held = (torch.arange(150).unsqueeze(1) % 7).to(torch.int32).expand(-1, 3).contiguous()
    logits = torch.zeros(150, 7)
    row = {"lengths": 3, "prompts": 1, "repetition": 1.0, "presence": 0.5, "frequency": 1.0}
    penalise(Penalties(CPU), logits, held, [{"rows": at, "held_rows": at} | row for at in range(150)])
    assert torch.equal(logits, -2.5 * torch.eye(7)[torch.arange(150) % 7])


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.full((1, 4), -INF)
    held = torch.tensor([[0, 1, 1]], dtype=torch.int32)
    row = {"rows": 0, "held_rows": 0, "lengths": 3, "prompts": 1, "repetition": 0.5, "presence": -2, "frequency": -2}
    penalise(Penalties(CPU), logits, held, [row])
    assert logits.tolist() == [[-INF] * 4]
