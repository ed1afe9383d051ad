"""What a serving benchmark sends, and what it makes of the answers: requests, their timelines, the sums over them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

PROMPT_TOKENS: Final = (16, 32, 48, 64, 96, 160, 256)
OUTPUT_TOKENS: Final = (4, 8, 16, 24, 40, 64, 96)
"""Each about as often as the next: most are short and some are long, as of a chat's turns."""
_WORDS: Final = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "with",
    "as",
    "be",
    "by",
    "at",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the workload."""

    arrival_s: float
    """From the start."""
    token_ids: list[int]
    text: str
    """Of about as many tokens, for servers that take no token ids."""
    max_tokens: int


def poisson_workload(count: int, rate: float, vocab_size: int, seed: int) -> list[Ask]:
    """``count`` requests, ``rate`` a second in the mean, with independent gaps and lengths. The same for one seed."""
    source = random.Random(seed)
    asks = []
    at = 0.0
    for _ in range(count):
        length = source.choice(PROMPT_TOKENS)
        asks.append(
            Ask(
                arrival_s=at,
                token_ids=[source.randrange(100, vocab_size) for _ in range(length)],
                text=" ".join(source.choice(_WORDS) for _ in range(length)),
                max_tokens=source.choice(OUTPUT_TOKENS),
            )
        )
        at += source.expovariate(rate)
    return asks


@dataclass(slots=True)
class Timeline:
    """What came of one request. Times are seconds from the start of the run."""

    arrival_s: float
    """When it was to be sent: a client or a batch that holds it back does not make it younger."""
    pieces: list[float] = field(default_factory=list)
    """When something of the answer came."""
    tokens: int = 0
    ended_s: float | None = None
    """None: it was cut at the run's time limit, or failed."""
    error: str | None = None

    @property
    def first_token_s(self) -> float:
        return self.pieces[0] - self.arrival_s

    @property
    def token_gap_s(self) -> float:
        """Mean time of a token after the first; 0 for an answer of one."""
        return (self.pieces[-1] - self.pieces[0]) / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Summary:
    """One side's run. Latencies are in seconds, of the requests that ended; nan if none did."""

    side: str
    requests: int
    ended: int
    wall_s: float
    """From the first arrival to the end of the last request, or to the time limit."""
    output_tokens_per_s: float
    requests_per_s: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    """Of all gaps between pieces of an answer, as its reader waits for them."""
    itl_p99: float
    e2e_p50: float
    e2e_p99: float
    goodput: float
    """Share of all requests that ended with a first token, and a mean time of the others, within the objectives."""
    error: str | None = None
    """What the first request that failed was told."""


def summarise(side: str, timelines: Sequence[Timeline], *, wall_s: float, ttft_s: float, itl_s: float) -> Summary:
    """``ttft_s`` and ``itl_s``: the objectives of goodput, in seconds."""
    ended = [line for line in timelines if line.ended_s is not None and line.pieces]
    gaps = [after - before for line in ended for before, after in itertools.pairwise(line.pieces)]
    firsts = [line.first_token_s for line in ended]
    wholes = [line.ended_s - line.arrival_s for line in ended if line.ended_s is not None]
    good = [line for line in ended if line.first_token_s <= ttft_s and line.token_gap_s <= itl_s]
    return Summary(
        side=side,
        requests=len(timelines),
        ended=len(ended),
        wall_s=wall_s,
        output_tokens_per_s=sum(line.tokens for line in timelines) / wall_s,
        requests_per_s=len(ended) / wall_s,
        ttft_p50=percentile(firsts, 0.50),
        ttft_p99=percentile(firsts, 0.99),
        itl_p50=percentile(gaps, 0.50),
        itl_p99=percentile(gaps, 0.99),
        e2e_p50=percentile(wholes, 0.50),
        e2e_p99=percentile(wholes, 0.99),
        goodput=len(good) / len(timelines),
        error=next((line.error for line in timelines if line.error is not None), None),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
