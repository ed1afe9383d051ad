from __future__ import annotations

import numpy as np
import pytest

from kernels.philox import philox, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("key", "counter", "wanted"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0_A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(key: int, counter: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """The published vectors of Philox 4x32-10: all zeros, all ones, digits of pi."""
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
    words = philox(np.array([key], np.uint64), (c0, c1, c2, c3))
    assert tuple(int(word[0]) for word in words) == wanted


def test_uniforms_are_even_and_differ_by_seed_choice_and_position() -> None:
    count = 20_000
    positions, zeros = list(range(count)), [0] * count
    base = uniform(zeros, zeros, positions)
    assert bool(((base >= 0) & (base < 1)).all())
    assert abs(float(base.mean()) - 0.5) < 0.01
    histogram, _ = np.histogram(base, 10, (0, 1))
    assert ((histogram - count / 10) ** 2 / (count / 10)).sum() < 27.9  # chi-square, 9 degrees, p = 0.001
    for other in (uniform([1] * count, zeros, positions), uniform(zeros, [1] * count, positions)):
        assert not bool((other == base).any())


def test_every_bit_of_seed_and_position_counts() -> None:
    seen = {
        float(uniform([seed], [0], [position])[0])
        for seed, position in [(0, 0), *((1 << bit, 0) for bit in range(64)), *((0, 1 << bit) for bit in range(64))]
    }
    assert len(seen) == 129


def test_any_integer_is_a_seed() -> None:
    assert uniform([-1, 2**64 + 5], [0, 0], [3, 3]).tolist() == uniform([2**64 - 1, 5], [0, 0], [3, 3]).tolist()
