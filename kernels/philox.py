"""Uniform random numbers by name: the counter-based generator Philox 4x32-10 (Salmon et al., SC 2011).

What names a number (seed, choice, position) is known on the host, so it is made there, for a whole batch at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_MASK: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS: Final = 10


def philox(key: Words, counter: tuple[Words, Words, Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four 32-bit random words (held in uint64) for each element of ``key`` (64 bits) and ``counter`` (four arrays of
    32-bit words); all ``[n]``."""
    key0, key1 = key & _MASK, key >> _HALF
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ key0,
            product1 & _MASK,
            (product0 >> _HALF) ^ c3 ^ key1,
            product0 & _MASK,
        )
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """A number in [0, 1) with 53 random bits for each (seed, choice, position); float64 ``[n]``.

    Seeds and positions are taken modulo 2**64, choices modulo 2**32.
    """
    seed, choice, position = (_words(values) for values in (seeds, choices, positions))
    high, low, _, _ = philox(seed, (position & _MASK, choice & _MASK, position >> _HALF, np.zeros_like(position)))
    words = (high >> np.uint64(5)) * np.uint64(1 << 26) + (low >> np.uint64(6))
    return words.astype(np.float64) / float(1 << 53)


def _words(values: Sequence[int]) -> Words:
    return np.array([value & 0xFFFFFFFFFFFFFFFF for value in values], np.uint64)
