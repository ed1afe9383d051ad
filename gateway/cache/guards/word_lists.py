"""Lists of words, written as running text."""

from __future__ import annotations


def in_order(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())
