"""What a draw is, written out slowly for one row in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kernels import sampling, truncation
from kernels.sampling import DrawParameters

WAYS = ["usual", "whole", "digits"]


@dataclass(frozen=True)
class Choice:
    """How one row is drawn."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def parameters(choices: list[Choice], uniforms: list[float]) -> DrawParameters:
    return DrawParameters(
        temperature=np.array([choice.temperature for choice in choices], np.float64),
        top_k=np.array([choice.top_k for choice in choices], np.int64),
        top_p=np.array([choice.top_p for choice in choices], np.float64),
        min_p=np.array([choice.min_p for choice in choices], np.float64),
        uniforms=np.array(uniforms, np.float64),
    )


def probabilities(logits: list[float], choice: Choice, slack: float = 0.0) -> list[float]:
    """The probability of each token; ``slack`` moves the borders of top_p and min_p by so much."""
    logits = [-math.inf if math.isnan(value) else value for value in logits]
    peak = max(logits)
    if peak == -math.inf:
        return [0.0] * len(logits)
    weight = [math.exp((value - peak) / choice.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order[: choice.top_k] if choice.top_k else order
    if choice.top_p < 1.0:
        total = sum(weight[token] for token in kept)
        before, nucleus = 0.0, []
        for token in kept:
            if nucleus and before >= (choice.top_p + slack) * total:
                break
            nucleus.append(token)
            before += weight[token]
        kept = nucleus
    kept = [token for token in kept if weight[token] >= min(1.0, choice.min_p * (1 - slack))]
    total = sum(weight[token] for token in kept)
    return [weight[token] / total if token in set(kept) else 0.0 for token in range(len(logits))]


def drawn(row: list[float], uniform: float, rounding: float) -> set[int]:
    """The first token whose cumulative probability exceeds ``uniform``; or, of any number within ``rounding`` of it."""
    tokens, reached = set(), 0.0
    for token, probability in enumerate(row):
        before, reached = reached, reached + probability
        if probability and before <= uniform + rounding and reached > uniform - rounding:
            tokens.add(token)
    return tokens


@contextmanager
def by_way(way: str) -> Iterator[None]:
    """Draw by one of the ways that must all come to the same: ``usual``; ``whole``: never from the likeliest alone;
    ``digits``: and the border by radix selection, as it is found on other devices."""
    before = sampling._SMALL_K, truncation._MOST_SORTED
    if way != "usual":
        sampling._SMALL_K = 0  # type: ignore[misc]
    if way == "digits":
        truncation._MOST_SORTED = -1  # type: ignore[misc]
    try:
        yield
    finally:
        sampling._SMALL_K, truncation._MOST_SORTED = before  # type: ignore[misc]


def frequencies(logits: torch.Tensor, choice: Choice, count: int) -> torch.Tensor:
    """How often each token comes where the uniform numbers are evenly spaced: its probability, within 1 / count."""
    uniforms = [(index + 0.5) / count for index in range(count)]
    tokens = sampling.sample(logits.expand(count, -1), parameters([choice] * count, uniforms))
    return torch.bincount(tokens, minlength=logits.shape[0]) / count
