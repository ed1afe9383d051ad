"""The engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from worker.engine.config import EngineConfig
from worker.engine.messages import EngineInfo, EngineOutput, EngineRequest, EngineStats
from worker.engine.plan import Runner
from worker.engine.request import EngineError, check_request
from worker.engine.scheduler import Scheduler


class ModelRunner(Runner, Protocol):
    """A runner together with what the engine must know of the model and its KV cache."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> Iterable[int]: ...

    @property
    def device(self) -> object:
        """Where the model runs; its text is its name."""
        ...


class Engine:
    """Drives a runner with the scheduler's plans. One thread; nothing here waits for anything but the runner."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self._runner = runner
        self._scheduler = Scheduler(
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_batched_tokens=config.max_batched_tokens,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
        )
        max_model_len = min(runner.max_model_len, self._scheduler.max_sequence_tokens)
        if config.max_model_len is not None:
            max_model_len = min(max_model_len, config.max_model_len)
        self.info = EngineInfo(
            max_model_len=max_model_len,
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            vocab_size=runner.vocab_size,
            eos_token_ids=list(runner.eos_token_ids),
            device=str(runner.device),
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_requests

    @property
    def stats(self) -> EngineStats:
        return self._scheduler.stats

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestRejected or QueueFull, and then holds nothing of it."""
        check_request(request, max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        self._scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests in whatever state they are; the last output of each that was open."""
        return [EngineOutput(i, [], "abort") for i in request_ids if self._scheduler.abort(i)]

    def step(self) -> list[EngineOutput]:
        """Run one step, if there is anything to run; what each request gained by it.

        Whatever the runner raises goes through: the state of its KV cache is unknown then, and the engine is done.
        """
        plan = self._scheduler.schedule()
        if plan is None:
            return []
        handle = self._runner.forward(plan)
        result = self._runner.sample(handle).result()
        return self._scheduler.update(plan, result.tokens)


def refusal(request_id: str, error: EngineError) -> EngineOutput:
    """The one output of a request that ``Engine.add`` refused."""
    return EngineOutput(request_id, [], "error", str(error), error_kind="rejected")
