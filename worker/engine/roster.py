"""Which requests are open, in what state each is, and what it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from worker.engine.fairness import Tenants
from worker.engine.kv_cache import KVCache, SequenceBlocks
from worker.engine.messages import EngineRequest
from worker.engine.plan import StepPlan
from worker.engine.request import Request, RequestRejected, Status
from worker.engine.waiting_queue import WaitingQueue


@dataclass(slots=True)
class Step:
    """A step in flight: the plan, and what the scheduler must remember until it retires."""

    plan: StepPlan
    requests: list[Request]
    """Whose the plan's spans are, in the same order."""
    units: list[int]
    """What the spans cost beside each other."""
    num_tokens: int
    num_draws: int
    departed: list[Request] = field(default_factory=list)
    """Those that left while this was the last step to touch their blocks."""


class Roster:
    """Moves requests between states: held, waiting, waiting for KV, loaded, running, finished.

    Blocks that a step in flight touches are released only when it has retired, whatever became of the request.
    """

    def __init__(self, kv: KVCache, *, most_short: int, fair: bool = True) -> None:
        """``most_short``: most tokens left to compute of a prompt that is called short."""
        self.kv = kv
        self.most_short = most_short
        self.open: dict[str, Request] = {}
        self.waiting = WaitingQueue(most_short)
        self.loading: dict[SequenceBlocks, Request] = {}
        """Those that wait for KV."""
        self.loaded: list[Request] = []
        """Admitted, in no step yet."""
        self.running: list[Request] = []
        self.tenants = Tenants()
        self.in_flight: deque[Step] = deque()
        """Oldest first."""
        self.retired_step = 0
        self.retired_keys: list[int] = []
        """Keys that the runner must forget with the next plan."""
        self.blocks_due = 0
        """Blocks of requests that left, which steps in flight still touch."""
        self.num_held = 0
        self.num_grammars = 0
        """Open requests with a grammar."""
        self.preemptions = 0
        self.preempted: list[Request] = []
        """Those preempted for the plan being made: they are not in it again."""
        self._fair = fair
        self._arrivals = 0

    @property
    def num_places(self) -> int:
        """Requests that hold blocks and will run."""
        return len(self.running) + len(self.loaded) + len(self.loading)

    def placed(self) -> Iterator[Request]:
        """The requests that ``num_places`` counts."""
        return chain(self.running, self.loaded, self.loading.values())

    @property
    def num_waiting(self) -> int:
        return self.num_held + len(self.waiting) + len(self.loading) + len(self.loaded)

    def add(self, request: EngineRequest, now: float) -> Request:
        """Open a request; one with a grammar is held until ``release_held``. Raises RequestRejected: its id is open."""
        if request.request_id in self.open:
            raise RequestRejected(f"A request with id {request.request_id!r} is open already.")
        name = (request.tenant or request.salt) if self._fair else ""
        tenant = self.tenants.enter(request.priority, name, request.weight if self._fair else 1.0)
        blocks = self.kv.sequence(request.prompt_token_ids, request.salt)
        record = Request(request, tenant, blocks, self._next_arrival(), now)
        self.open[record.request_id] = record
        if record.has_grammar:
            self.num_grammars += 1
            self.num_held += 1
        else:
            record.status = Status.WAITING
            self.waiting.push(record)
        return record

    def release_held(self, request: Request) -> None:
        """A held request may run. Its place in the order of arrival is the end."""
        self.num_held -= 1
        request.status = Status.WAITING
        request.arrival = self._next_arrival()
        self.waiting.push(request)

    def admit(self, request: Request, num_computed: int, *, loading: bool) -> None:
        """A waiting request was given blocks, of which the first ``num_computed`` tokens are in the cache."""
        self.waiting.remove(request)
        request.tenant.places += 1
        request.num_tokens = len(request.token_ids)
        if loading:
            request.status = Status.WAITING_FOR_KV
            self.loading[request.blocks] = request
        else:
            self._place(request, num_computed)

    def end_load(self, blocks: SequenceBlocks) -> Request:
        """The blocks that a request waited for are there."""
        request = self.loading.pop(blocks)
        self._place(request, blocks.loaded_tokens)
        return request

    def start(self, request: Request, key: int) -> None:
        """A loaded request gets its first span; ``key`` names it to the runner."""
        self.loaded.remove(request)
        request.status = Status.RUNNING
        request.key = key
        self.running.append(request)

    def preempt(self, request: Request) -> None:
        """A running request gives its blocks back and keeps its tokens. It waits where it was in order of arrival."""
        self.running.remove(request)
        self._let_go(request)
        request.status = Status.WAITING
        self.waiting.put_back(request)
        self.preempted.append(request)
        self.preemptions += 1

    def finish(self, request: Request) -> None:
        """An open request ends, in whatever state it is. A running one is still in ``running`` until ``sweep``."""
        status = request.status
        request.status = Status.FINISHED
        del self.open[request.request_id]
        if request.has_grammar:
            self.num_grammars -= 1
        if status is Status.RUNNING:
            self._let_go(request)
        elif status is Status.WAITING:
            self.waiting.remove(request)
        elif status is Status.HELD:
            self.num_held -= 1
        else:
            if status is Status.LOADED:
                self.loaded.remove(request)
            else:
                del self.loading[request.blocks]
            request.tenant.places -= 1
            self.kv.release(request.blocks)
        self.tenants.leave(request.tenant)

    def sweep(self) -> None:
        """Take finished requests off the running ones."""
        self.running = [request for request in self.running if request.status is Status.RUNNING]

    def retire(self) -> Step:
        """The oldest step in flight has been run: what it alone kept is free."""
        step = self.in_flight.popleft()
        self.retired_step = step.plan.step
        return step

    def release_departed(self, step: Step) -> None:
        """Release what only ``step`` kept, once its draws are with their requests."""
        for request in step.departed:
            self.blocks_due -= _num_blocks(request.blocks)
            self.kv.computed(request.blocks, request.token_ids, min(request.num_scheduled, len(request.token_ids)))
            self._release(request)

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _place(self, request: Request, num_computed: int) -> None:
        request.status = Status.LOADED
        request.num_scheduled = num_computed
        request.num_slots = request.blocks.room
        request.next_change = request.blocks.next_change
        self.loaded.append(request)

    def _let_go(self, request: Request) -> None:
        """Give back what a running request holds, here and in the runner."""
        request.tenant.places -= 1
        self.retired_keys.append(request.key)
        request.key = -1
        if request.last_step <= self.retired_step:
            self._release(request)
            return
        self.blocks_due += _num_blocks(request.blocks)
        next(step for step in self.in_flight if step.plan.step == request.last_step).departed.append(request)

    def _release(self, request: Request) -> None:
        self.kv.release(request.blocks)
        request.num_slots = 0
        request.num_scheduled = 0


def _num_blocks(blocks: SequenceBlocks) -> int:
    return sum(map(len, blocks.tables))
