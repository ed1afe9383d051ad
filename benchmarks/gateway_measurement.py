"""What the gateway adds to a request: ``python benchmarks/gateway.py [--check] [--json] [--quick]``.

One gateway process with keys, limits, a budget and the ledger on (real Postgres, real Redis), in front of a mock
backend that answers at once: without prompt log and answer cache (`penstock`), with the log, redacted (`+log`), with
every answer kept, too (`+keep`), and with every answer found (`+hits`). Beside it in the same run a bare pass-through
of Litestar and aiohttp, and Portkey's gateway and LiteLLM's proxy where ``make bench-peers`` installed them. Load and
mock run on one core, what is measured on another.

- whole answers at 1, 16 and 64 at a time: latency above that of the mock alone, CPU time of the process a request;
- streams of 32 events at 16 at a time: CPU time;
- 1,000 streams of 5 events a second each: how many failed, by how much gaps between events grew, memory afterwards;
- one client that reads one byte a second from an endless stream: memory, and the latency of others meanwhile.

The sides take turns, three rounds each, and the median counts. Measure on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from gateway_load import Ask, listen, quantile, read_slowly, repeat
from gateway_targets import (
    LOAD_CORE,
    PACED,
    NotInstalled,
    Target,
    litellm,
    mock,
    passthrough,
    penstock,
    portkey,
)

CONCURRENT: Final = (1, 16, 64)
ROUNDS: Final = 3
STREAMS: Final = 1000
SIDES: Final[tuple[Callable[[Path, int], AbstractContextManager[list[Target]]], ...]] = (
    passthrough,
    penstock,
    portkey,
    litellm,
)
CPU_BAR_MS: Final = 1.0
LATENCY_BAR_MS: Final = 1.0
RATIO_BAR: Final = 2.0
GROWTH_BAR_MB: Final = 30.0
"""Of memory, from the end of one wave of streams to the end of the next, and beside a slow reader."""


@dataclass(frozen=True, slots=True)
class Row:
    target: str
    kind: str
    concurrent: int
    added_p50_ms: float | None
    """Above the mock alone; None: there was no answer."""
    p99_ms: float | None
    cpu_ms: float | None
    """Of the target, a request."""
    requests_per_s: float
    failed: int


@dataclass(frozen=True, slots=True)
class Streams:
    target: str
    streams: int
    failed: int
    added_gap_p50_ms: float
    added_gap_p99_ms: float
    delay_p50_ms: float
    delay_p99_ms: float
    cpu_share: float
    """Of one core, while they ran."""
    memory_mb: tuple[float, float, float]
    """Before, after the first wave, after the second."""


@dataclass(frozen=True, slots=True)
class SlowReader:
    target: str
    growth_mb: float
    others_p50_ms: tuple[float, float]
    """Without it and beside it."""


def cpu_s(pid: int) -> float:
    """CPU time of a process and its children, all threads."""
    total = 0
    for process in _tree(pid):
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{process}/task").iterdir():
                with contextlib.suppress(OSError):
                    total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9


def memory_mb(pid: int) -> float:
    """Proportional set size of a process and its children."""
    total = 0
    for process in _tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def _tree(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        found.append(one := left.pop())
        left += children.get(one, [])
    return found


async def cell(target: Target, kind: str, concurrent: int, seconds: float, base_ms: float | None) -> Row:
    pid = target.process.pid if target.process else None
    before = cpu_s(pid) if pid else 0.0
    outcome = await repeat(target.asking("m", stream=kind == "stream"), concurrent, seconds)
    spent = cpu_s(pid) - before if pid else 0.0
    p50 = outcome.quantile_ms(0.5)
    return Row(
        target=target.name,
        kind=kind,
        concurrent=concurrent,
        added_p50_ms=None if base_ms is None or not outcome.done else p50 - base_ms,
        p99_ms=outcome.quantile_ms(0.99) if outcome.done else None,
        cpu_ms=spent * 1000 / outcome.done if pid and outcome.done else None,
        requests_per_s=outcome.done / outcome.elapsed_s,
        failed=outcome.failed,
    )


def median(rows: Sequence[Row]) -> Row:
    """Of each figure by itself."""

    def of(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return Row(
        rows[0].target,
        rows[0].kind,
        rows[0].concurrent,
        of([row.added_p50_ms for row in rows]),
        of([row.p99_ms for row in rows]),
        of([row.cpu_ms for row in rows]),
        of([row.requests_per_s for row in rows]) or 0.0,
        sum(row.failed for row in rows),
    )


async def requests(targets: Sequence[Target], direct: Target, seconds: float) -> list[Row]:
    for target in targets:
        await repeat(target.asking("m", stream=False), 8, 1.0)
        await repeat(target.asking("m", stream=True), 8, 0.5)
    found: dict[tuple[str, str, int], list[Row]] = {}
    cells = [("whole", concurrent) for concurrent in CONCURRENT] + [("stream", 16)]
    for round_ in range(ROUNDS):
        for kind, concurrent in cells:
            base = (await repeat(direct.asking("m", stream=kind == "stream"), concurrent, 0.5)).quantile_ms(0.5)
            for target in targets:
                note(f"round {round_ + 1}: {target.name}, {kind}, {concurrent} at a time")
                row = await cell(target, kind, concurrent, seconds, base)
                found.setdefault((target.name, kind, concurrent), []).append(row)
    return [median(rows) for rows in found.values()]


async def many_streams(target: Target, count: int) -> Streams:
    assert target.process is not None
    pid, ask = target.process.pid, target.asking(PACED, stream=True)
    memory = [memory_mb(pid)]
    failed, gaps, delays, share = 0, [], [], 0.0
    for wave in range(2):
        note(f"{target.name}: {count} streams, wave {wave + 1}")
        before, began = cpu_s(pid), asyncio.get_running_loop().time()
        paced = await listen(ask, count, ramp_s=3.0, limit_s=40.0)
        share = (cpu_s(pid) - before) / (asyncio.get_running_loop().time() - began)
        failed += paced.failed
        gaps += paced.added_gaps_s
        delays += paced.delays_s
        await asyncio.sleep(2)
        memory.append(memory_mb(pid))
    return Streams(
        target.name,
        count,
        failed,
        quantile(gaps, 0.5) * 1000,
        quantile(gaps, 0.99) * 1000,
        quantile(delays, 0.5) * 1000,
        quantile(delays, 0.99) * 1000,
        share,
        (memory[0], memory[1], memory[2]),
    )


async def slow_reader(target: Target, seconds: float) -> SlowReader:
    assert target.process is not None
    note(f"{target.name}: a client that reads one byte a second")
    whole: Ask = target.asking("m", stream=False)
    alone = (await repeat(whole, 4, 2.0)).quantile_ms(0.5)
    before = memory_mb(target.process.pid)
    async with asyncio.TaskGroup() as group:
        group.create_task(read_slowly(target.asking("endless", stream=True), seconds))
        await asyncio.sleep(seconds / 3)
        beside = (await repeat(whole, 4, 2.0)).quantile_ms(0.5)
        await asyncio.sleep(seconds / 3)
        grown = memory_mb(target.process.pid) - before
    return SlowReader(target.name, grown, (alone, beside))


def misses(rows: Sequence[Row], streams: Streams | None, slow: SlowReader | None) -> list[str]:
    at = {(row.target, row.kind, row.concurrent): row for row in rows}
    ours, bare = at["penstock", "whole", 16], at["passthrough", "whole", 16]
    ours_alone = at["penstock", "whole", 1]
    assert ours.cpu_ms is not None
    assert bare.cpu_ms is not None
    assert ours_alone.added_p50_ms is not None
    found = []
    if ours.cpu_ms > CPU_BAR_MS:
        found.append(f"{ours.cpu_ms:.2f} ms CPU a request at 16, not {CPU_BAR_MS}")
    if ours_alone.added_p50_ms > LATENCY_BAR_MS:
        found.append(f"+{ours_alone.added_p50_ms:.2f} ms at 1, not {LATENCY_BAR_MS}")
    if ours.cpu_ms > RATIO_BAR * bare.cpu_ms:
        found.append(f"{ours.cpu_ms / bare.cpu_ms:.2f} times the pass-through's CPU time, not {RATIO_BAR}")
    if failed := sum(row.failed for row in rows if row.target == "penstock"):
        found.append(f"{failed} requests failed")
    if streams is not None:
        if streams.failed:
            found.append(f"{streams.failed} streams failed")
        if streams.memory_mb[2] - streams.memory_mb[1] > GROWTH_BAR_MB:
            found.append(f"memory grew by {streams.memory_mb[2] - streams.memory_mb[1]:.0f} MB from wave to wave")
    if slow is not None and slow.growth_mb > GROWTH_BAR_MB:
        found.append(f"memory grew by {slow.growth_mb:.0f} MB beside a slow reader")
    return found


def show(rows: Sequence[Row], streams: Streams | None, slow: SlowReader | None) -> None:
    columns = f"{'kind':<7} {'at once':>7} {'added p50 ms':>13} {'p99 ms':>8} {'CPU ms':>7} {'req/s':>8} failed"
    print(f"{'target':<14} {columns}")
    for row in sorted(rows, key=lambda row: (row.kind, row.concurrent)):
        added = "-" if row.added_p50_ms is None else f"{row.added_p50_ms:.2f}"
        cpu = "-" if row.cpu_ms is None else f"{row.cpu_ms:.2f}"
        p99 = "-" if row.p99_ms is None else f"{row.p99_ms:.2f}"
        print(
            f"{row.target:<14} {row.kind:<7} {row.concurrent:>7} {added:>13} {p99:>8} {cpu:>7} "
            f"{row.requests_per_s:>8.0f} {row.failed:>6}"
        )
    if streams is not None:
        memory = " -> ".join(f"{megabytes:.0f}" for megabytes in streams.memory_mb)
        print(
            f"{streams.streams} streams, 5 events a second each: {streams.failed} failed; gap between events "
            f"+{streams.added_gap_p50_ms:.2f} ms p50, +{streams.added_gap_p99_ms:.2f} ms p99; an event takes "
            f"{streams.delay_p50_ms:.2f} ms p50, {streams.delay_p99_ms:.2f} ms p99; {streams.cpu_share:.0%} of a core; "
            f"memory {memory} MB (before, after each wave)"
        )
    if slow is not None:
        alone, beside = slow.others_p50_ms
        print(
            f"one byte a second from an endless stream: memory {slow.growth_mb:+.1f} MB; others' p50 {alone:.2f} ms "
            f"without it, {beside:.2f} ms beside it"
        )


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def run(options: argparse.Namespace, folder: Path) -> tuple[list[Row], Streams | None, SlowReader | None]:
    streams: Streams | None = None
    slow: SlowReader | None = None
    with contextlib.ExitStack() as stack:
        backend = stack.enter_context(mock(folder))
        targets: list[Target] = []
        for side in SIDES:
            if options.only and side.__name__ not in options.only.split(","):
                continue
            try:
                targets += stack.enter_context(side(folder, backend))
            except NotInstalled:
                note(f"{side.__name__} is not installed: `make bench-peers` installs it")
        rows = await requests(targets, Target("direct", Ask(backend, "m")), 1.0 if options.quick else 3.0)
        ours = next((target for target in targets if target.name == "penstock"), None)
        if ours is not None and not options.quick:
            streams = await many_streams(ours, options.streams)
            slow = await slow_reader(ours, 15.0)
    return rows, streams, slow


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object of all figures")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed, and say which")
    parser.add_argument("--quick", action="store_true", help="shorter rounds, no streams")
    parser.add_argument("--only", help="names of sides, with commas between; `penstock` and `passthrough` for --check")
    parser.add_argument("--streams", type=int, default=STREAMS)
    options = parser.parse_args(arguments)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.sched_setaffinity(0, {LOAD_CORE})
    with tempfile.TemporaryDirectory() as folder:
        rows, streams, slow = uvloop.run(run(options, Path(folder)))
    if options.json:
        figures: dict[str, Any] = {"requests": [asdict(row) for row in rows]}
        figures["streams"] = None if streams is None else asdict(streams)
        figures["slow_reader"] = None if slow is None else asdict(slow)
        print(json.dumps(figures))
    else:
        show(rows, streams, slow)
    if options.check and (missed := misses(rows, streams, slow)):
        sys.exit("missed: " + "; ".join(missed))
