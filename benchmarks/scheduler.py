"""The host's cost of a step, without a model: ``python benchmarks/scheduler.py [--check]``.

Scheduler and KV cache as the engine sets them up (prefix caching and fairness on, four tenants), driven by made-up
results: the time of ``schedule`` and ``update`` for so many running requests that all decode, blocks of 16 tokens
included as they come. And the time to name, match and allocate the blocks of a prompt of 32,768 tokens that the cache
does not know.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Final

from worker.engine.compute_cost import CostModel
from worker.engine.kv_cache import KVCache
from worker.engine.messages import EngineRequest
from worker.engine.plan import SamplingParams, StepPlan, StepResult
from worker.engine.scheduler import Scheduler
from worker.protocol.block_names import BlockNamer

BLOCK_SIZE: Final = 16
TENANTS: Final = 4
PROMPT_TOKENS: Final = 100
LONG_PROMPT: Final = 32_768
BARS: Final = {256: 1.0, 1024: 4.5}
"""Most milliseconds of a step, p50 and mean, for so many running requests."""
LONG_PROMPT_BAR: Final = 20.0
"""Most milliseconds for the long prompt, best of the rounds."""


@dataclass(frozen=True, slots=True)
class Row:
    running: int
    p50_ms: float
    mean_ms: float
    p99_ms: float
    us_per_request: float
    bar_ms: float | None


def make(running: int, max_batched_tokens: int, num_blocks: int) -> Scheduler:
    namer = BlockNamer("benchmark", BLOCK_SIZE)
    return Scheduler(
        KVCache(num_blocks, BLOCK_SIZE, namer=namer, max_step_tokens=max_batched_tokens),
        max_batched_tokens=max_batched_tokens,
        max_running=running,
        max_waiting=running,
        costs=CostModel(1024),
    )


def result_of(plan: StepPlan, source: random.Random) -> StepResult:
    return StepResult([source.randrange(100, 50_000) for span in plan.spans if span.sample])


def measure(running: int, steps: int, waiting: int = 0) -> Row:
    """All requests decode, at different places of their blocks."""
    source = random.Random(running)
    tokens = PROMPT_TOKENS + steps + 200
    scheduler = make(running, running + 8192, 2 + running * (2 + tokens // BLOCK_SIZE))
    for index in range(running + waiting):
        prompt = [source.randrange(100, 50_000) for _ in range(PROMPT_TOKENS + index % BLOCK_SIZE)]
        scheduler.add(
            EngineRequest(
                request_id=f"request-{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0),
                max_tokens=tokens - len(prompt),
                stop_token_ids=[2],
                tenant=f"tenant-{index % TENANTS}",
            )
        )
    while True:
        plan = scheduler.schedule()
        assert plan is not None
        decodes = all(span.count == 1 for span in plan.spans) and len(plan.spans) == running
        scheduler.update(plan, result_of(plan, source), 1000)
        if decodes:
            break
    gc.collect()
    gc.freeze()  # as the engine process does once it is set up
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        assert plan is not None
        assert len(plan.spans) == running
        result = result_of(plan, source)
        read = time.perf_counter()
        scheduler.update(plan, result, 12_345)
        times.append((time.perf_counter() - read + planned - started) * 1000)
    gc.unfreeze()
    mean = statistics.fmean(times)
    p99 = sorted(times)[int(0.99 * (len(times) - 1))]
    return Row(running, statistics.median(times), mean, p99, 1000 * mean / running, BARS.get(running))


def measure_long_prompt(rounds: int) -> list[float]:
    """Milliseconds for each of ``rounds`` prompts that are new to the cache."""
    source = random.Random(0)
    kv = KVCache(3 * LONG_PROMPT // BLOCK_SIZE, BLOCK_SIZE, namer=BlockNamer("benchmark", BLOCK_SIZE))
    times = []
    for _ in range(rounds):
        prompt = [source.randrange(50_000) for _ in range(LONG_PROMPT)]
        started = time.perf_counter()
        blocks = kv.sequence(prompt, "")
        tables = kv.admit(blocks, kv.match(blocks, prompt), LONG_PROMPT)
        times.append((time.perf_counter() - started) * 1000)
        assert tables is not None
        kv.computed(blocks, prompt, LONG_PROMPT)
        kv.release(blocks)
    return times


def missed_bars(rows: list[Row], long_prompt_ms: float) -> list[str]:
    missed = [
        f"{row.running} running: p50 {row.p50_ms:.2f} ms, mean {row.mean_ms:.2f} ms, at most {row.bar_ms} ms"
        for row in rows
        if row.bar_ms is not None and max(row.p50_ms, row.mean_ms) > row.bar_ms
    ]
    if long_prompt_ms > LONG_PROMPT_BAR:
        missed.append(f"prompt of {LONG_PROMPT} tokens: {long_prompt_ms:.1f} ms, at most {LONG_PROMPT_BAR} ms")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print JSON to stdout instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args()
    rows = [measure(running, options.steps) for running in options.running]
    long_prompt = measure_long_prompt(5)
    best = min(long_prompt)
    if options.json:
        print(json.dumps({"steps": [asdict(row) for row in rows], "long_prompt_ms": long_prompt}))
    else:
        print("Schedule and update, all requests decoding, ms a step:")
        print(f"{'running':>8} {'p50':>8} {'mean':>8} {'p99':>8} {'us/request':>11} {'bar':>6}")
        for row in rows:
            bar = "" if row.bar_ms is None else f"{row.bar_ms:.1f}"
            times = f"{row.p50_ms:8.3f} {row.mean_ms:8.3f} {row.p99_ms:8.3f}"
            print(f"{row.running:8} {times} {row.us_per_request:11.2f} {bar:>6}")
        print(
            f"Name, match and allocate a prompt of {LONG_PROMPT} tokens: best of {len(long_prompt)} {best:.1f} ms, "
            f"bar {LONG_PROMPT_BAR:.0f}"
        )
    missed = missed_bars(rows, best)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    if options.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
