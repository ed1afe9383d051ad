"""The engine: requests in, one step at a time, tokens out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from worker.engine.compute_cost import CostModel
from worker.engine.config import EngineConfig
from worker.engine.kv_cache import KVCache
from worker.engine.kv_connector import HostTier
from worker.engine.messages import (
    Control,
    ControlDone,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    ErrorKind,
    Grammar,
)
from worker.engine.plan import CacheGroup, Drawn, Runner, StepPlan, TokenMasks
from worker.engine.request import ControlRefused, EngineError, GrammarFailed, check_request
from worker.engine.scheduler import Scheduler
from worker.protocol.block_names import BlockNamer
from worker.protocol.kv_events import KVEvent

log = logging.getLogger("penstock.engine")

_POLL_S: Final = 0.002
"""How often to look after compilers and transfers when there is nothing else to do."""
_CHECK_INTERVAL_S: Final = 10.0
"""An engine that becomes idle verifies its KV cache, but no more often than this."""
_LOG: Final = "The engine's log has the details."


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

    @property
    def cache_groups(self) -> Sequence[CacheGroup]: ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host tier; 0: there is none."""
        ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def model_fingerprint(self) -> str: ...


class GrammarFollower(Protocol):
    """What the engine needs of ``worker.engine.grammar.Grammars``."""

    @property
    def pending(self) -> int: ...

    def start(self, request_id: str, grammar: Grammar) -> None: ...

    def ready(self) -> list[tuple[str, str | None]]: ...

    def masks(self, sampled: Sequence[tuple[int, str]]) -> TokenMasks | None: ...

    def accept(self, request_id: str, token_id: int) -> bool: ...

    def drop(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _Submitted:
    plan: StepPlan
    drawn: Drawn
    started_us: int


class Engine:
    """Drives a runner with the scheduler's plans. One thread; nothing here waits for anything but the runner.

    With overlap, a step is planned and submitted before the tokens of the one before it are read.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        clock: Callable[[], float] = time.monotonic,
        grammars: Callable[[], GrammarFollower] | None = None,
        ranks: int = 1,
    ) -> None:
        """``clock`` gives seconds; ``ranks`` of the runner work on each step; ``grammars`` is called when the first
        request with a grammar comes (None: those of the model)."""
        depth = 2 if config.overlap else 1
        max_prefill = min(config.max_prefill_per_request or config.max_batched_tokens, config.max_batched_tokens)
        host_tier = HostTier(runner.num_host_blocks) if runner.num_host_blocks and config.prefix_caching else None
        self._kv = KVCache(
            runner.num_blocks,
            runner.block_size,
            runner.cache_groups,
            namer=BlockNamer(runner.model_fingerprint, runner.block_size) if config.prefix_caching else None,
            connector=host_tier,
            record_events=config.kv_events,
            max_step_tokens=depth * max_prefill,
        )
        self._scheduler = Scheduler(
            self._kv,
            max_batched_tokens=config.max_batched_tokens,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_prefill_per_request=config.max_prefill_per_request,
            fair=config.fair,
            depth=depth,
            costs=CostModel(runner.hidden_size),
            clock=clock,
        )
        max_model_len = min(runner.max_model_len, self._kv.max_sequence_tokens)
        if config.max_model_len is not None:
            max_model_len = min(max_model_len, config.max_model_len)
        self.info = EngineInfo(
            max_model_len=max_model_len,
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            vocab_size=runner.vocab_size,
            eos_token_ids=list(runner.eos_token_ids),
            device=str(runner.device),
            hidden_size=runner.hidden_size,
            model_fingerprint=runner.model_fingerprint,
        )
        self._config = config
        self._runner = runner
        self._clock = clock
        self._ranks = ranks
        self._make_grammars = grammars or self._grammars_of_model
        self._grammars: GrammarFollower | None = None
        self._following: set[str] = set()
        """Open requests with a grammar."""
        self._submitted: deque[_Submitted] = deque()
        self._retired_us = 0
        self._stalled = False
        """Whether the last step found nothing that could run."""
        self._sleeping = 0
        self._checked_at = clock()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_requests or bool(self._submitted)

    @property
    def wait_s(self) -> float | None:
        """How long ``step`` has nothing to do unless a message comes; None: for ever."""
        if self.has_work and not self._stalled:
            return 0.0
        return _POLL_S if self.has_work or self._kv.transfers_open else None

    @property
    def stats(self) -> EngineStats:
        stats = self._scheduler.stats
        return msgspec.structs.replace(stats, sleeping=self._sleeping) if self._sleeping else stats

    def kv_events(self) -> list[KVEvent]:
        """Changes of the prefix cache since the last call, if the configuration asks for them."""
        return self._kv.events()

    def add(self, request: EngineRequest) -> None:
        """Queue a request; a sleeping engine wakes. Raises RequestRejected, QueueFull or, if it can't wake,
        ControlRefused, and then holds none of it."""
        check_request(request, max_model_len=self.info.max_model_len, vocab_size=self.info.vocab_size)
        self._wake()
        config = self._config
        self._scheduler.add(request, queue_timeout_s=config.queue_timeout_s, deadline_s=config.deadline_s)
        if request.grammar is not None:
            if self._grammars is None:
                self._grammars = self._make_grammars()
            self._following.add(request.request_id)
            self._grammars.start(request.request_id, request.grammar)
        self._stalled = False

    def abort(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """End requests in whatever state they are; the last output of each that was open."""
        return self._ended([EngineOutput(i, [], "abort") for i in request_ids if self._scheduler.abort(i)])

    def control(self, message: Control) -> ControlDone:
        """Do what ``message`` asks; the answer says why not, if not."""
        try:
            match message.action:
                case "sleep":
                    self._sleep(message.level)
                case "wake":
                    self._wake()
                case "reset_cache":
                    self._kv.reset()
        except ControlRefused as refused:
            return ControlDone(message.id, str(refused))
        return ControlDone(message.id)

    def step(self) -> list[EngineOutput]:
        """Plan and submit one step, if there is anything to run, and retire one; what each request gained.

        Whatever the runner raises goes through: the state of its KV cache is unknown then, and the engine is done.
        """
        outputs = self._look_around()
        started_us = self._now_us()
        plan = self._scheduler.schedule()
        self._submit_transfers()
        if plan is not None:
            handle = self._runner.forward(plan)
            drawn = self._runner.sample(handle, self._masks())
            self._submitted.append(_Submitted(plan, drawn, started_us))
        self._stalled = not self._submitted
        if self._submitted and (plan is None or len(self._submitted) == self._scheduler.depth):
            outputs += self._retire()
            self._submit_transfers()
        self._check()
        return outputs

    def _retire(self) -> list[EngineOutput]:
        """Read what the oldest step gave."""
        submitted = self._submitted.popleft()
        result = submitted.drawn.result()
        now_us = self._now_us()
        elapsed_us = (now_us - max(self._retired_us, submitted.started_us)) * self._ranks
        self._retired_us = now_us
        return self._ended(self._scheduler.update(submitted.plan, result, elapsed_us, self._accept))

    def _look_around(self) -> list[EngineOutput]:
        """Take notice of ended transfers, compiled grammars and times that are over."""
        if self._kv.transfers_open:
            for result in self._runner.transfers_done():
                self._scheduler.transfer_done(result)
        outputs = []
        if self._grammars is not None and self._grammars.pending:
            for request_id, error in self._grammars.ready():
                if request_id not in self._following:
                    continue
                if error is None:
                    self._scheduler.release_held(request_id)
                elif self._scheduler.abort(request_id):
                    outputs.append(EngineOutput(request_id, [], "error", error, error_kind="grammar"))
        return self._ended(outputs + self._scheduler.expire())

    def _submit_transfers(self) -> None:
        for transfer in self._kv.transfers():
            self._runner.transfer(transfer)

    def _masks(self) -> TokenMasks | None:
        rows = self._scheduler.grammar_rows()
        return self._grammars.masks(rows) if rows and self._grammars is not None else None

    def _accept(self, request_id: str, token_id: int) -> bool:
        from worker.engine.grammar import GrammarFailure

        assert self._grammars is not None
        try:
            return self._grammars.accept(request_id, token_id)
        except GrammarFailure as failure:
            raise GrammarFailed(str(failure)) from failure

    def _ended(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Drop the grammars of those that end with ``outputs``; the same outputs."""
        if self._following and self._grammars is not None:
            for output in outputs:
                if output.finish_reason is not None and output.request_id in self._following:
                    self._following.remove(output.request_id)
                    self._grammars.drop(output.request_id)
        return outputs

    def _sleep(self, level: int) -> None:
        if level not in (1, 2):
            raise ControlRefused(f"The level of sleep is 1 or 2, not {level}.")
        if self._scheduler.has_requests:
            raise ControlRefused("Requests are open. Wait for their end, or abort them, and ask again.")
        if self._sleeping == level:
            return
        if self._sleeping > level:
            self._wake()
        while self._submitted:
            self._retire()
        self._submit_transfers()
        try:
            self._runner.sleep(level)
        except (OSError, ValueError, MemoryError) as error:
            log.exception("the engine stays awake")
            raise ControlRefused(f"The weights could not be kept ({type(error).__name__}). {_LOG}") from error
        for result in self._runner.transfers_done():
            self._scheduler.transfer_done(result)
        self._kv.reset()
        self._sleeping = level

    def _wake(self) -> None:
        """Do nothing if it is awake. Raises ControlRefused, and sleeps on, if the runner can't wake."""
        if self._sleeping:
            try:
                self._runner.wake()
            except (OSError, ValueError, MemoryError) as error:
                log.exception("the engine can't wake; the next request tries again")
                raise ControlRefused(f"The model could not be loaded again ({type(error).__name__}). {_LOG}") from error
            self._sleeping = 0

    def _check(self) -> None:
        """Verify the KV cache, each step if the configuration asks for it, else when the engine becomes idle."""
        if not self._config.check_every_step:
            if self.has_work or self._clock() - self._checked_at < _CHECK_INTERVAL_S:
                return
            self._checked_at = self._clock()
        self._scheduler.check()

    def _grammars_of_model(self) -> GrammarFollower:
        # Here and not above: most engines never see a grammar.
        from worker.engine.grammar import Grammars

        return Grammars(self._config.model_path, self.info.vocab_size, self.info.eos_token_ids)

    def _now_us(self) -> int:
        return round(self._clock() * 1_000_000)


def refusal(request_id: str, error: EngineError) -> EngineOutput:
    """The one output of a request that ``Engine.add`` refused."""
    kind: ErrorKind = "asleep" if isinstance(error, ControlRefused) else "rejected"
    return EngineOutput(request_id, [], "error", str(error), error_kind=kind)
