"""Requests, schedulers and engines for tests, in few words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.worker.engine.toy_runner import ToyRunner
from worker.engine.config import EngineConfig
from worker.engine.engine import Engine
from worker.engine.kv_cache import KVCache
from worker.engine.messages import EngineOutput, EngineRequest
from worker.engine.plan import SamplingParams, StepPlan, StepResult
from worker.engine.scheduler import Scheduler
from worker.protocol.block_names import BlockNamer


def request(
    name: str, prompt: int | list[int] = 4, max_tokens: int = 4, *, seed: int = 0, stop: Sequence[int] = (), **more: Any
) -> EngineRequest:
    """A prompt given by its length differs from those of other seeds from its first token on."""
    tokens = [(7 * i + seed) % 1000 for i in range(prompt)] if isinstance(prompt, int) else prompt
    sampling = more.pop("sampling", SamplingParams(seed=seed))
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tokens,
        sampling=sampling,
        max_tokens=max_tokens,
        stop_token_ids=list(stop),
        **more,
    )


def scheduler(
    num_blocks: int = 64,
    *,
    block_size: int = 4,
    max_batched_tokens: int = 16,
    max_running: int = 4,
    max_waiting: int = 8,
    caching: bool = False,
    **more: Any,
) -> Scheduler:
    namer = BlockNamer("test", block_size) if caching else None
    return Scheduler(
        KVCache(num_blocks, block_size, namer=namer),
        max_batched_tokens=max_batched_tokens,
        max_running=max_running,
        max_waiting=max_waiting,
        **({"clock": Clock()} | more),
    )


def spans(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    assert plan is not None
    return [(s.key, s.start, s.count, s.sample) for s in plan.spans]


def run(s: Scheduler, plan: StepPlan | None, token: int = 9, elapsed_us: int = 0) -> list[EngineOutput]:
    assert plan is not None
    return s.update(plan, StepResult([token] * sum(span.sample for span in plan.spans)), elapsed_us)


def finish(s: Scheduler, token: int = 9) -> list[EngineOutput]:
    """Run until nothing is open."""
    outputs = []
    while s.has_requests:
        outputs += run(s, s.schedule(), token)
    return outputs


class Clock:
    """Seconds, as told; with ``tick``, each look at it takes as long."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 1000.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def engine(
    *,
    max_running: int = 4,
    max_batched_tokens: int = 16,
    clock: Clock | None = None,
    grammars: Any = None,
    ranks: int = 1,
    toy: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Engine, ToyRunner]:
    """An engine with a toy, whose blocks are verified after each step."""
    runner = ToyRunner(
        **({"block_size": 4, "max_batched_tokens": max_batched_tokens, "max_running": max_running} | (toy or {}))
    )
    settings = {"model_path": "toy", "check_every_step": True} | config
    made = Engine(
        EngineConfig(max_running=max_running, max_batched_tokens=max_batched_tokens, **settings),
        runner,
        clock=clock or Clock(),
        grammars=grammars,
        ranks=ranks,
    )
    return made, runner


def drain(made: Engine, most_steps: int = 5000) -> dict[str, list[EngineOutput]]:
    """Step until nothing is open; the outputs of each request."""
    outputs: dict[str, list[EngineOutput]] = defaultdict(list)
    for _ in range(most_steps):
        if not made.has_work:
            return outputs
        for output in made.step():
            outputs[output.request_id].append(output)
    raise AssertionError("the engine makes no progress")


def tokens_of(outputs: Sequence[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
