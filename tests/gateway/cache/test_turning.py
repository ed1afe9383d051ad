"""A turned vector keeps its cosines, and nothing else that one could read without the key."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from operator import mul
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cache.turning import Turning
from gateway.datakeys.data_key import DataKey

ONE, OTHER = DataKey(UUID(int=1), b"1" * 32), DataKey(UUID(int=2), b"2" * 32)


def drawn(seed: int, dimensions: int) -> array[float]:
    random = Random(seed)
    return array("f", (random.gauss(0, 1) for _ in range(dimensions)))


def read(vector: bytes) -> array[float]:
    return array("f", vector)


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(map(mul, one, other)) / (math.hypot(*one) * math.hypot(*other))


@given(st.integers(2, 200), st.integers(0, 1000))
def test_cosines_and_lengths_stay(dimensions: int, seed: int) -> None:
    turning = Turning(ONE, dimensions)
    one, other = drawn(seed, dimensions), drawn(seed + 1, dimensions)
    turned_one, turned_other = read(turning.turn(one)), read(turning.turn(other.tobytes()))
    assert cosine(turned_one, turned_other) == pytest.approx(cosine(one, other), abs=1e-5)
    assert math.hypot(*turned_one) == pytest.approx(math.hypot(*one), rel=1e-5)


def test_the_same_key_turns_in_the_same_way() -> None:
    vector = drawn(1, 384)
    assert Turning(ONE, 384).turn(vector) == Turning(DataKey(UUID(int=1), b"1" * 32), 384).turn(vector)


@pytest.mark.parametrize("dimensions", [384, 768, 1000, 1024])
def test_without_the_key_it_is_like_no_other(dimensions: int) -> None:
    vector = drawn(2, dimensions)
    views = [vector, read(Turning(ONE, dimensions).turn(vector)), read(Turning(OTHER, dimensions).turn(vector))]
    for at, one in enumerate(views):
        for other in views[at + 1 :]:
            assert abs(cosine(one, other)) < 0.2


@pytest.mark.parametrize("dimensions", [384, 1000])
def test_one_large_number_is_spread_over_all(dimensions: int) -> None:
    turning = Turning(ONE, dimensions)
    for at in range(0, dimensions, 37):
        vector = array("f", [0.0] * dimensions)
        vector[at] = 1.0
        assert max(map(abs, read(turning.turn(vector)))) < 0.4


def test_a_vector_of_another_embedder_is_refused() -> None:
    with pytest.raises(ValueError, match="383 dimensions, not 384"):
        Turning(ONE, 384).turn(drawn(1, 383))
