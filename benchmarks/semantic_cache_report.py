"""What ``semantic_cache.py`` counts, and how it tells it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec


class Pair(msgspec.Struct, frozen=True):
    asked: str
    kept: str
    same: bool
    """Whether the answer to ``kept`` answers ``asked``."""
    kind: str = ""
    set: str = ""


@dataclass(slots=True)
class SetResult:
    name: str
    paraphrases: int = 0
    hits: int = 0
    near_misses: int = 0
    false_hits: int = 0
    false_by_vector: int = 0
    """Near misses at or above the threshold: what would be hits without guards."""
    stopped_by: Counter[str] = field(default_factory=Counter)
    """Of the near misses: the guard, or the threshold, whichever stands first against them."""
    lost_to: Counter[str] = field(default_factory=Counter)
    """The same of the paraphrases that were no hits."""
    wrong: list[tuple[Pair, str]] = field(default_factory=list)

    def add(self, pair: Pair, hit: bool, near: bool, guard: str | None) -> None:
        """``near``: at or above the threshold. ``guard``: that objects, when asked directly."""
        why = guard or ("threshold" if not near else "look-up")
        if pair.same:
            self.paraphrases += 1
            self.hits += hit
        else:
            self.near_misses += 1
            self.false_hits += hit
            self.false_by_vector += near
        if not hit:
            (self.lost_to if pair.same else self.stopped_by)[why] += 1
        if hit != pair.same:
            self.wrong.append((pair, why))

    @property
    def hit_rate(self) -> float:
        return self.hits / self.paraphrases if self.paraphrases else 1.0

    @property
    def false_hit_rate(self) -> float:
        return self.false_hits / self.near_misses if self.near_misses else 0.0


@dataclass(slots=True)
class Report:
    threshold: float
    sets: list[SetResult]
    latencies_ms: dict[int, list[float]]
    """Look-ups at a time -> sorted times."""

    def total(self) -> SetResult:
        whole = SetResult("all")
        for each in self.sets:
            whole.paraphrases += each.paraphrases
            whole.hits += each.hits
            whole.near_misses += each.near_misses
            whole.false_hits += each.false_hits
            whole.false_by_vector += each.false_by_vector
            whole.stopped_by += each.stopped_by
            whole.lost_to += each.lost_to
            whole.wrong += each.wrong
        return whole

    def missed(self, least_hits: float) -> list[str]:
        """The bars that a set misses, or all of them together."""
        out = []
        for each in [*self.sets, self.total()]:
            if each.false_hits:
                out.append(f"{each.name}: {each.false_hits} of {each.near_misses} near misses are hits; none may be")
            if each.hit_rate < least_hits:
                out.append(f"{each.name}: {each.hit_rate:.1%} of the paraphrases hit; {least_hits:.0%} should")
        return out

    def as_dict(self) -> dict[str, Any]:
        return {
            "threshold": self.threshold,
            "sets": [
                {
                    "name": each.name,
                    "paraphrases": each.paraphrases,
                    "hit_rate": round(each.hit_rate, 4),
                    "near_misses": each.near_misses,
                    "false_hits": each.false_hits,
                    "false_hit_rate": round(each.false_hit_rate, 4),
                    "false_by_vector": each.false_by_vector,
                    "stopped_by": dict(each.stopped_by.most_common()),
                    "lost_to": dict(each.lost_to.most_common()),
                }
                for each in [*self.sets, self.total()]
            ],
            "look_up_ms": {
                str(concurrent): {"p50": round(quantile(times, 0.5), 2), "p99": round(quantile(times, 0.99), 2)}
                for concurrent, times in self.latencies_ms.items()
            },
        }


def quantile(sorted_values: list[float], share: float) -> float:
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * share))] if sorted_values else 0.0


def print_report(report: Report, *, show: bool, least_hits: float) -> None:
    print(f"Pairs through the answer cache, threshold {report.threshold:g}:")
    print(f"{'set':>12} {'paraphrases':>12} {'hit':>7} {'near misses':>12} {'false hits':>11} {'by vector alone':>16}")
    total = report.total()
    for each in [*report.sets, total]:
        print(
            f"{each.name:>12} {each.paraphrases:12} {each.hit_rate:7.1%} {each.near_misses:12} {each.false_hits:11} "
            f"{each.false_by_vector:16}"
        )
    print(f"\n{'':>18} {'near misses stopped':>20} {'paraphrases lost':>17}")
    for guard, count in (total.stopped_by + total.lost_to).most_common():
        print(f"{guard:>18} {total.stopped_by[guard] or '':>20} {total.lost_to[guard] or '':>17}")
        del count
    print(f"\nA look-up, embedding, search and guards, {total.paraphrases + total.near_misses} questions kept; ms:")
    print(f"{'at a time':>12} {'p50':>8} {'p99':>8}")
    for concurrent, times in report.latencies_ms.items():
        print(f"{concurrent:12} {quantile(times, 0.5):8.2f} {quantile(times, 0.99):8.2f}")
    print(f"Bars: no false hit; {least_hits:.0%} of the paraphrases")
    if show:
        for pair, why in total.wrong:
            print(f"\n{'lost' if pair.same else 'FALSE'} ({why}) {pair.asked}\n     {pair.kept}")
