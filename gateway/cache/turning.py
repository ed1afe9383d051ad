"""Vectors turned in a way that their tenant's data key knows alone.

A text can be guessed from its vector. Redis must compare vectors, so they cannot be sealed; but a rotation leaves every
cosine as it is, and without the rotation nothing can be guessed. Erasing the key erases it.

Each round flips signs, shuffles, and mixes by Walsh-Hadamard transforms: orthogonal steps, drawn from the key.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import shake_256
from operator import add, itemgetter, mul, sub
from typing import Final

from gateway.cache.parts import DataKey

_ROUNDS: Final = 2
_NONCE: Final = b"penstock vector rotation"
"""As long as the nonces of a data key, which are random else: no value that is sealed will ever have it."""
_ORDER_BYTES: Final = 8


class Turning:
    """One key's, for vectors of so many dimensions; less than 1 ms for a vector of 384."""

    def __init__(self, key: DataKey, dimensions: int) -> None:
        if dimensions < 2:
            raise ValueError("a vector of less than 2 dimensions has no direction to be turned")
        seed = key.encrypt(_NONCE, bytes(32), b"answer cache")
        self._dimensions = dimensions
        self._block = 1 << (dimensions.bit_length() - 1)
        self._scale = 1 / math.sqrt(self._block)
        self._rounds = [_round(seed + bytes([number]), dimensions) for number in range(_ROUNDS)]

    def turn(self, vector: array[float] | bytes) -> bytes:
        """float32 in the machine's order, which is little-endian, as Redis wants it. Raises ValueError for a vector of
        other dimensions."""
        given = array("f", vector) if isinstance(vector, bytes) else vector
        if len(given) != self._dimensions:
            raise ValueError(f"a vector has {len(given)} dimensions, not {self._dimensions}")
        turned: Sequence[float] = given
        block, scale = self._block, self._scale
        for order, signs in self._rounds:
            turned = list(map(mul, order(turned), signs))
            # Both blocks of a power of two, which overlap unless the dimensions are one, reach every number.
            turned[:block] = _mixed(turned[:block], scale)
            if block < self._dimensions:
                turned[-block:] = _mixed(turned[-block:], scale)
        return array("f", turned).tobytes()


def _round(seed: bytes, dimensions: int) -> tuple[Callable[[Sequence[float]], Sequence[float]], list[float]]:
    drawn = shake_256(seed).digest(dimensions * (_ORDER_BYTES + 1))
    keys = [drawn[at : at + _ORDER_BYTES] for at in range(0, dimensions * _ORDER_BYTES, _ORDER_BYTES)]
    order = sorted(range(dimensions), key=keys.__getitem__)
    return itemgetter(*order), [1.0 if byte & 1 else -1.0 for byte in drawn[dimensions * _ORDER_BYTES :]]


def _mixed(values: Iterable[float], scale: float) -> list[float]:
    """The transform, its rows in some order; norms stay."""
    mixed = list(values)
    for _ in range(len(mixed).bit_length() - 1):
        even, odd = mixed[::2], mixed[1::2]
        mixed = [*map(add, even, odd), *map(sub, even, odd)]
    return [value * scale for value in mixed]
