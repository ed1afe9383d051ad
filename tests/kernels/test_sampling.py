from __future__ import annotations

import torch

from kernels.sampling import greedy, philox, sample, uniform


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


def test_philox_known_answers() -> None:
    """The published vectors of Philox 4x32-10: all zeros, all ones, digits of pi."""
    zero = philox(torch.tensor([0]), words(0, 0, 0, 0))  # type: ignore[arg-type]
    assert [int(word) for word in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(torch.tensor([-1]), words(*[0xFFFFFFFF] * 4))  # type: ignore[arg-type]
    assert [int(word) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    key = 0x299F31D0_A4093822
    pi = philox(torch.tensor([key]), words(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))  # type: ignore[arg-type]
    assert [int(word) for word in pi] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_uniforms_are_even_and_differ_by_seed_choice_and_position() -> None:
    count = 20_000
    positions = torch.arange(count)
    zeros = torch.zeros(count, dtype=torch.int64)
    base = uniform(zeros, zeros, positions)
    assert bool(((base >= 0) & (base < 1)).all())
    assert abs(float(base.mean()) - 0.5) < 0.01
    assert float(torch.histc(base, 10, 0, 1).std()) < 150
    for other in (uniform(zeros + 1, zeros, positions), uniform(zeros, zeros + 1, positions)):
        assert not bool((other == base).any())


def test_greedy_takes_the_first_of_equals_and_never_nan() -> None:
    nan = float("nan")
    logits = torch.tensor([[1.0, 3.0, 3.0], [nan, 1.0, 2.0], [nan, nan, nan], [-float("inf"), 0.0, nan]])
    assert greedy(logits).tolist() == [1, 2, 0, 1]


def test_greedy_finds_the_largest_wherever_it_stands() -> None:
    for at in (0, 1, 5, 998, 999):
        logits = torch.linspace(-3, 3, 1000).roll(500).expand(3, -1).clone()
        logits[1, at] = 4.0
        logits[2] = -logits[1]
        assert greedy(logits).tolist() == [499, at, 500]
    assert greedy(torch.tensor([[2.0, 2.0, 1.0], [-5.0, -6.0, -5.0], [0.0, 0.0, 0.0]])).tolist() == [0, 0, 0]
    assert greedy(torch.full((1, 4), -float("inf"))).tolist() == [0]


def draw_many(logits: torch.Tensor, temperature: float, top_p: float, count: int = 20_000) -> torch.Tensor:
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    full = torch.full((count,), 1.0)
    tokens = sample(logits.expand(count, -1), full * temperature, full * top_p, uniforms)
    return torch.bincount(tokens, minlength=logits.shape[0]) / count


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        torch.testing.assert_close(
            draw_many(logits, temperature, 1.0), torch.softmax(logits / temperature, 0), atol=2e-4, rtol=0
        )


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    torch.testing.assert_close(draw_many(logits, 1.0, 0.7), torch.tensor([0, 0.625, 0, 0.375]), atol=2e-4, rtol=0)
    assert draw_many(logits, 1.0, 0.01).tolist() == [0, 1, 0, 0]


def test_a_set_that_reaches_top_p_exactly_takes_no_more() -> None:
    """Probabilities that fp32 holds exactly, so that the sums meet ``top_p`` to the bit."""
    logits = torch.tensor([0.0, -float("inf"), 0.0, 0.0, 0.0])
    assert torch.softmax(logits, 0).tolist() == [0.25, 0.0, 0.25, 0.25, 0.25]
    for top_p, kept in ((0.25, [1, 0, 0, 0, 0]), (0.5, [0.5, 0, 0.5, 0, 0]), (0.75, [1 / 3, 0, 1 / 3, 1 / 3, 0])):
        torch.testing.assert_close(
            draw_many(logits, 1.0, top_p), torch.tensor(kept, dtype=torch.float32), atol=1e-4, rtol=0
        )


def test_rows_are_drawn_alike_alone_and_together() -> None:
    torch.manual_seed(5)
    logits = torch.randn(6, 1000)
    temperature, top_p = torch.tensor([0.2, 1.0, 5.0] * 2), torch.tensor([1.0, 0.9, 0.5, 0.5, 1.0, 0.9])
    uniforms = torch.rand(6, dtype=torch.float64)
    together = sample(logits, temperature, top_p, uniforms).tolist()
    alone = [
        int(sample(logits[i : i + 1], temperature[i : i + 1], top_p[i : i + 1], uniforms[i : i + 1])) for i in range(6)
    ]
    assert together == alone


def test_extreme_logits_draw_something_possible() -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[nan, 0.0, -inf], [-inf, -inf, 3.0], [nan, nan, nan], [1e30, -1e30, 0.0]])
    for top_p in (1.0, 0.5):
        tokens = sample(
            logits, torch.full((4,), 1e-3), torch.full((4,), top_p), torch.full((4,), 1 - 1e-16, dtype=torch.float64)
        )
        assert tokens.tolist() == [1, 2, 0, 0]


def test_temperatures_beyond_fp32_are_the_nearest_within() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.9999, float("nan")]] * 4)
    full = torch.ones(4)
    uniforms = torch.tensor([0.0, 0.3, 0.6, 1 - 1e-16], dtype=torch.float64)
    for top_p in (1.0, 0.9):
        for tiny in (0.0, 1e-300, 1e-45, 1e-38):
            assert sample(logits, full * tiny, full * top_p, uniforms).tolist() == [1] * 4
        assert sample(logits, full * float("inf"), full, uniforms).tolist() == [0, 0, 1, 2]
