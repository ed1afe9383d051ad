"""Does the semantic cache know a question again, and no other? ``python benchmarks/semantic_cache.py [--check]``.

Labelled pairs (``semantic_cache_pairs.jsonl``, or ``--pairs``): paraphrases, of which the second question's answer
should answer the first, and near misses, of which it must not. Each pair is put through the answer cache as the
gateway has it, on a real Redis with its search module: an embedded one, or the one that ``--redis`` names. Then all of
the kept questions are in one partition, and look-ups are timed. Needs the distribution's ``cache`` extra.

A file of pairs has an object a line: ``asked``, ``kept``, ``same`` (true or false), ``kind``, ``set``. Of our sets the
first half is what the guards were first written by. Each other one was written before the guards were tried on it, and
looked at after that: what it says now is more than what it said then. Hits of paraphrases and false hits when first
tried: second half 84 % and 1, third 67 % and 2, fourth 69 % and 4, fifth 64 % and 0; sixth, paraphrases alone, 66 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec
import package_first  # noqa: F401
import structlog
from semantic_cache_report import Pair, Report, SetResult, print_report

from gateway.assembly import describe
from gateway.billing.usage import TokenUsage
from gateway.cache import guards
from gateway.cache.found import Hit, Miss
from gateway.cache.local_embedder import LocalEmbedder
from gateway.cache.question import Question
from gateway.cache.service import AnswerCache
from gateway.clock import SystemClock
from gateway.datakeys.data_key import KEY_BYTES, DataKey
from gateway.local.services import EmbeddedRedis
from gateway.policies.answer_cache import CacheRules
from gateway.secret_key import SecretKey

PAIRS: Final = Path(__file__).with_name("semantic_cache_pairs.jsonl")
LEAST_HITS: Final = 0.75
TENANT, PROJECT = uuid4(), uuid4()
USAGE: Final = TokenUsage(20, 50)
CROWD: Final = "all"
PATIENCE_S: Final = 10.0
"""For a look-up whose outcome counts; the timed ones have the gateway's own limit."""


class MemoryKeys:
    """Data keys without a database: they are cached in the gateway too."""

    def __init__(self) -> None:
        self._key = DataKey(uuid4(), sha256(b"benchmark").digest()[:KEY_BYTES])

    async def key(self, tenant_id: UUID, end_user_hash: str | None) -> DataKey:
        return self._key

    async def by_id(self, tenant_id: UUID, key_id: UUID) -> DataKey | None:
        return self._key if key_id == self._key.id else None


class Tally:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count(self, name: str, labels: Mapping[str, str], amount: int = 1) -> None:
        self.counts[" ".join([name, *labels.values()])] += amount


def read_pairs(path: Path) -> list[Pair]:
    return [msgspec.json.decode(line, type=Pair) for line in path.read_bytes().splitlines() if line.strip()]


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """A Redis with the search module."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory() as folder:
        redis = EmbeddedRedis(Path(folder), durable=False)
        try:
            yield redis.start()
        finally:
            redis.stop()


def question(text: str, partition: str, rules: CacheRules) -> Question:
    messages = [{"role": "system", "content": partition}, {"role": "user", "content": text}]
    fields = {"model": "m", "temperature": 0, "messages": messages}
    body = msgspec.json.decode(msgspec.json.encode(fields), type=dict[str, msgspec.Raw])
    return Question(
        api="chat_completions",
        route="m",
        version="1",
        body=body,
        tenant_id=TENANT,
        project_id=PROJECT,
        end_user=None,
        rules=rules,
    )


def answer_cache(url: str, embedder: LocalEmbedder, tally: Tally, **limits: Any) -> AnswerCache:
    secret = SecretKey("of-the-benchmark-" + uuid4().hex)
    clock = SystemClock()
    return AnswerCache(
        url, secret, MemoryKeys(), guards, describe, embedder=embedder, clock=clock, counter=tally, **limits
    )


async def ready(cache: AnswerCache) -> None:
    begin = time.monotonic()
    while cache.semantic_available is None and time.monotonic() < begin + PATIENCE_S:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    if not cache.semantic_available:
        sys.exit(f"The semantic tier is off: {cache.semantic_fault}. It wants Redis 8, or Redis Stack.")


async def keep(cache: AnswerCache, text: str, partition: str, rules: CacheRules) -> None:
    found = await cache.look_up(question(text, partition, rules))
    if isinstance(found, Miss):
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "An answer."}}
        whole = msgspec.json.encode({"id": "c", "object": "chat.completion", "model": "m", "choices": [choice]})
        found.keep(whole, USAGE, describe("chat_completions", whole), uuid4().hex)


async def hits(cache: AnswerCache, pairs: Sequence[Pair], rules: CacheRules) -> list[bool]:
    """Of each pair, in a partition of its own, whether what was kept answered what is asked."""
    for at, pair in enumerate(pairs):
        await keep(cache, pair.kept, f"pair {at}", rules)
    await cache.drained(60)
    return [
        isinstance(await cache.look_up(question(pair.asked, f"pair {at}", rules)), Hit) for at, pair in enumerate(pairs)
    ]


async def similarities(embedder: LocalEmbedder, pairs: Sequence[Pair]) -> list[float]:
    import numpy as np

    async def vector(text: str) -> Any:
        return np.frombuffer(await embedder.embed(guards.essence(text)), dtype=np.float32)

    return [float(await vector(pair.asked) @ await vector(pair.kept)) for pair in pairs]


async def timed(cache: AnswerCache, texts: Sequence[str], rules: CacheRules, concurrent: int) -> list[float]:
    """Milliseconds of each look-up, all of them of texts that the embedder has not seen."""
    waiting, times = iter(texts), []

    async def client() -> None:
        for text in waiting:
            begin = time.perf_counter()
            await cache.look_up(question(text, CROWD, rules))
            times.append((time.perf_counter() - begin) * 1000)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrent):
            group.create_task(client())
    return sorted(times)


async def measure(url: str, pairs: Sequence[Pair], rules: CacheRules) -> Report:
    tally = Tally()
    async with LocalEmbedder() as embedder:
        await embedder.embed("The model is loaded.")
        async with answer_cache(url, embedder, tally, limit_s=PATIENCE_S) as cache:
            await ready(cache)
            hit = await hits(cache, pairs, rules)
        near = await similarities(embedder, pairs)
    results: dict[str, SetResult] = {}
    for pair, was_hit, similarity in zip(pairs, hit, near, strict=True):
        rejection = guards.check(pair.asked, pair.kept)
        results.setdefault(pair.set, SetResult(pair.set)).add(
            pair, was_hit, similarity >= rules.threshold, None if rejection is None else rejection.guard
        )
    latencies = {concurrent: await latency(url, pairs, rules, concurrent) for concurrent in (1, 8)}
    return Report(rules.threshold, list(results.values()), latencies)


async def latency(url: str, pairs: Sequence[Pair], rules: CacheRules, concurrent: int) -> list[float]:
    tally = Tally()
    async with LocalEmbedder() as embedder, answer_cache(url, embedder, tally, limit_s=PATIENCE_S) as cache:
        await ready(cache)
        for pair in pairs:
            await keep(cache, pair.kept, CROWD, rules)
        await cache.drained(60)
        kept = {pair.kept for pair in pairs}
        asked = list(dict.fromkeys(pair.asked for pair in pairs if pair.asked not in kept))
        return await timed(cache, asked, rules, concurrent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--redis", metavar="URL", help="a running Redis with its search module, not an embedded one")
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="labelled pairs, a JSON object a line")
    parser.add_argument("--threshold", type=float, default=CacheRules().threshold, help="least cosine of a hit")
    parser.add_argument("--show", action="store_true", help="print each pair that went wrong")
    parser.add_argument("--json", action="store_true", help="print JSON to stdout instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    pairs = read_pairs(options.pairs)
    with server(options.redis) as url:
        rules = CacheRules(mode="semantic", threshold=options.threshold, time_words=True)
        report = asyncio.run(measure(url, pairs, rules))
    if options.json:
        print(json.dumps(report.as_dict()))
    else:
        print_report(report, show=options.show, least_hits=LEAST_HITS)
    missed = report.missed(LEAST_HITS)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    if options.check and missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
