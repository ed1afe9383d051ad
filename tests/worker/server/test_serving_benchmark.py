"""The serving benchmark's own arithmetic, and that it drives a server as it says."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.server.conftest import FLEET_TOKEN, MODEL, StartScripted

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serving

    yield serving
    for name in [name for name in sys.modules if name.startswith("serving")]:
        del sys.modules[name]


def test_the_workload_is_the_same_for_one_seed_and_arrives_at_its_rate(bench: Any) -> None:
    asks = bench.poisson_workload(2000, 4.0, 1000, 7)
    assert asks == bench.poisson_workload(2000, 4.0, 1000, 7)
    assert asks != bench.poisson_workload(2000, 4.0, 1000, 8)
    gaps = [after.arrival_s - before.arrival_s for before, after in itertools.pairwise(asks)]
    mean = sum(gaps) / len(gaps)
    assert math.isclose(mean, 1 / 4.0, rel_tol=0.1)
    assert math.isclose(sum((gap - mean) ** 2 for gap in gaps) / len(gaps), mean**2, rel_tol=0.2)  # as of Poisson
    assert len({len(ask.token_ids) for ask in asks}) > 5
    assert len({ask.max_tokens for ask in asks}) > 5


def test_a_summary_counts_what_ended_and_when(bench: Any) -> None:
    line = sys.modules["serving_workload"].Timeline
    timelines = [
        line(0.0, [1.0, 1.5, 2.0], 3, 2.0),
        line(1.0, [4.0, 4.1], 2, 4.5),  # its first token is too late
        line(1.0, [2.0, 8.0], 2, 8.0),  # its second one is
        line(2.0, [3.0], 1, None),  # cut
        line(3.0, [], 0, None, "503"),
    ]
    summary = bench.summarise("a", timelines, wall_s=10.0, ttft_s=2.0, itl_s=0.5)
    assert (summary.requests, summary.ended, summary.error) == (5, 3, "503")
    assert summary.output_tokens_per_s == 0.8
    assert (summary.ttft_p50, summary.ttft_p99) == (1.0, 3.0)
    assert (summary.itl_p50, summary.itl_p99) == (0.5, 6.0)
    assert (summary.e2e_p50, summary.e2e_p99) == (3.5, 7.0)
    assert summary.goodput == 0.2
    assert math.isnan(bench.summarise("b", timelines[4:], wall_s=1, ttft_s=1, itl_s=1).ttft_p50)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.99, 4), (1.0, 4)])
def test_percentiles(bench: Any, share: float, value: int) -> None:
    assert sys.modules["serving_workload"].percentile([3, 1, 4, 2], share) == value


@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("batch", [None, 3])
async def test_each_request_is_sent_once_and_static_groups_never_meet(
    scripted: StartScripted, bench: Any, batch: int | None, token_ids: bool
) -> None:
    server = await scripted("word " * 40, step_s=0.005, token_required=True, max_model_len=512)
    target = bench.Target(server.url, MODEL, FLEET_TOKEN, token_ids, True)
    asks = bench.poisson_workload(8, 100.0, 1000, 3)
    timelines, wall_s = await bench.drive(target, asks, bench.Gate(batch), 30)
    assert [line.error for line in timelines] == [None] * 8
    assert [line.tokens for line in timelines] == [ask.max_tokens for ask in asks]
    for ask, line in zip(asks, timelines, strict=True):
        assert ask.arrival_s < line.pieces[0] <= line.ended_s <= wall_s
        assert line.pieces == sorted(line.pieces)
    together = _most_at_once(timelines)
    assert together <= batch if batch else together > 3
    summary = bench.summarise("continuous", timelines, wall_s=wall_s, ttft_s=30, itl_s=30)
    assert summary.goodput == 1
    assert "continuous" in bench.table([summary])


async def test_a_run_over_its_limit_is_cut_and_told(scripted: StartScripted, bench: Any) -> None:
    server = await scripted("word " * 40, step_s=0.05)
    target = bench.Target(server.url, MODEL, None, True, True)
    asks = [ask for ask in bench.poisson_workload(40, 100.0, 1000, 3) if ask.max_tokens == 96][:2]
    timelines, wall_s = await bench.drive(target, asks, bench.Gate(), 0.5)
    assert wall_s < 5
    summary = bench.summarise("continuous", timelines, wall_s=wall_s, ttft_s=1, itl_s=1)
    assert (summary.ended, summary.goodput) == (0, 0)
    assert bench.missed([summary]) == ["continuous: 2 of 2 requests did not end"]


async def test_a_refusal_is_told(scripted: StartScripted, bench: Any) -> None:
    server = await scripted()
    target = bench.Target(server.url, "another-model", None, True, True)
    timelines, _ = await bench.drive(target, bench.WARM_UP, bench.Gate(), 5)
    assert timelines[0].error.startswith("404: ")


def test_bars_compare_ours_with_each_other_side(bench: Any) -> None:
    def side(name: str, tokens: int, first: float) -> Any:
        lines = [sys.modules["serving_workload"].Timeline(0.0, [first], tokens, first)]
        return bench.summarise(name, lines, wall_s=1.0, ttft_s=1, itl_s=1)

    ours = side("continuous", 10, 0.5)
    assert bench.missed([ours, side("static", 10, 0.6), side("transformers", 1, 0.6)]) == []
    assert len(bench.missed([ours, side("static", 11, 0.6)])) == 1
    assert len(bench.missed([ours, side("static", 9, 0.5)])) == 1


def _most_at_once(timelines: list[Any]) -> int:
    """Requests whose answers overlap, from first piece to last."""
    return max(sum(other.pieces[0] <= line.pieces[0] <= other.pieces[-1] for other in timelines) for line in timelines)
