"""Who runs in the next step, how many of its tokens, in which blocks."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from worker.engine.kv_cache import BlockPool
from worker.engine.messages import EngineOutput, EngineRequest, EngineStats, FinishReason
from worker.engine.plan import NewSequence, Span, StepPlan
from worker.engine.request import QueueFull, Request, RequestRejected, Status


class Scheduler:
    """Shares one token budget among all requests, step after step: ``schedule``, run the plan, ``update``.

    Running requests go first, decodes before prefill chunks; what is left of the budget admits waiting requests, in
    order of class, then arrival. A request is admitted when blocks for every token it knows are free, so only the
    growth of decodes can use the pool up. Then the last running request in that same order is preempted: it gives
    back its blocks, keeps its tokens, waits at the head of its class and is recomputed.

    The first running request can always go on, for ``add`` refuses what would not fit into the whole pool: so every
    request ends.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_batched_tokens: int, max_running: int, max_waiting: int
    ) -> None:
        """``num_blocks`` counts the null block; ``max_waiting`` requests may be open beyond ``max_running``."""
        if not 1 <= max_running <= max_batched_tokens:
            raise ValueError(
                f"max_running is {max_running} and max_batched_tokens {max_batched_tokens}: "
                "each running sequence needs one token of a step"
            )
        self.block_size = block_size
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.max_open = max_running + max_waiting
        self._pool = BlockPool(num_blocks)
        self._open: dict[str, Request] = {}
        self._running: list[Request] = []
        """Sorted by ``Request.order``."""
        self._by_key: dict[int, Request] = {}
        self._waiting = WaitingQueue()
        self._retired: list[int] = []
        self._in_flight: StepPlan | None = None
        self._aborted_in_flight: list[Request] = []
        self._arrivals = 0
        self._next_key = 0
        self._steps = 0
        self._preemptions = 0

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens, prompt and output, of a sequence that has the pool to itself."""
        return self._pool.capacity * self.block_size

    @property
    def has_requests(self) -> bool:
        return bool(self._open)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=self._pool.usage,
            steps=self._steps,
            preemptions=self._preemptions,
        )

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestRejected when it could never fit, QueueFull when too many are open."""
        total = len(request.prompt_token_ids) + request.max_tokens
        if total > self.max_sequence_tokens:
            raise RequestRejected(
                f"Prompt and max_tokens make {total} tokens; the KV cache holds {self.max_sequence_tokens}. "
                "Shorten the prompt or lower max_tokens."
            )
        if request.request_id in self._open:
            raise RequestRejected(f"A request with id {request.request_id!r} is open already.")
        if len(self._open) >= self.max_open:
            raise QueueFull(f"The engine already has {self.max_open} requests open. Try again in a moment.")
        record = Request(request, self._arrivals)
        self._arrivals += 1
        self._open[record.request_id] = record
        self._waiting.push(record)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; whether it was open.

        Its blocks are free at once, but while a step is in flight: then when ``update`` retires that step.
        """
        request = self._open.pop(request_id, None)
        if request is None:
            return False
        if request.status is Status.WAITING:
            self._waiting.remove(request)
            request.status = Status.FINISHED
        elif self._in_flight is not None:
            self._aborted_in_flight.append(request)
        else:
            self._running.remove(request)
            self._release(request, Status.FINISHED)
        return True

    def schedule(self) -> StepPlan | None:
        """The next step; None when no request is open. Call ``update`` before the next call."""
        if self._in_flight is not None:
            raise RuntimeError("the step in flight has not been retired")
        running = self._running
        decodes: list[Span] = []
        prefills: list[Span] = []
        new: list[NewSequence] = []
        # Decodes are provided for before any prefill chunk: max_running never exceeds the budget.
        prefill_budget = self.max_batched_tokens
        for request in running:
            if len(request.token_ids) - request.num_computed == 1:
                prefill_budget -= 1
        position = 0
        # From first to last in order, and victims from the end: nobody is preempted who is in this plan already.
        while position < len(running):
            request = running[position]
            start = request.num_computed
            remaining = len(request.token_ids) - start
            if remaining == 1:
                new_blocks: list[list[int]] = []
                if start == len(request.block_ids) * self.block_size:
                    if not self._pool.num_free:
                        self._preempt_last()
                        continue
                    block = self._pool.allocate(1)
                    request.block_ids += block
                    new_blocks = [block]
                decodes.append(Span(request.key, start, 1, new_blocks, True))
            elif count := min(remaining, prefill_budget):
                prefill_budget -= count
                prefills.append(Span(request.key, start, count, [], count == remaining))
            position += 1
        self._admit(prefill_budget, new, prefills)
        if not decodes and not prefills:
            return None
        self._steps += 1
        plan = StepPlan(self._steps, new, decodes + prefills, self._retired)
        self._retired = []
        self._in_flight = plan
        return plan

    def update(self, plan: StepPlan, tokens: list[int]) -> list[EngineOutput]:
        """Retire ``plan`` with the tokens it drew; what each request gained, its end included. A chunk of a prompt that
        draws nothing is an output too.

        ``tokens``: one for each span with ``sample``, in the plan's order. Tokens of requests that were aborted in
        the meantime are dropped.
        """
        if plan is not self._in_flight:
            raise RuntimeError(f"step {plan.step} is not in flight")
        if len(tokens) != sum(span.sample for span in plan.spans):
            raise RuntimeError(f"step {plan.step} drew {len(tokens)} tokens, not one for each span that samples")
        self._in_flight = None
        for request in self._aborted_in_flight:
            self._release(request, Status.FINISHED)
        some_finished = bool(self._aborted_in_flight)
        self._aborted_in_flight = []
        outputs: list[EngineOutput] = []
        drawn = iter(tokens)
        for span in plan.spans:
            token = next(drawn) if span.sample else None
            request_or_none = self._by_key.get(span.key)
            if request_or_none is None:
                continue
            request = request_or_none
            request.num_computed = span.start + span.count
            prefilled = min(request.num_computed, request.num_prompt)
            gained = prefilled > request.num_prefilled
            if gained:
                request.num_prefilled = prefilled
            if token is None:
                if gained:
                    outputs.append(EngineOutput(request.request_id, [], prefilled=prefilled))
                continue
            request.token_ids.append(token)
            finish_reason: FinishReason | None = None
            if token in request.stop_token_ids:
                finish_reason = "stop"
            elif len(request.token_ids) - request.num_prompt >= request.max_tokens:
                finish_reason = "length"
            if finish_reason is not None:
                del self._open[request.request_id]
                self._release(request, Status.FINISHED)
                some_finished = True
            outputs.append(EngineOutput(request.request_id, [token], finish_reason))
        if some_finished:
            self._running = [request for request in self._running if request.status is Status.RUNNING]
        return outputs

    def _admit(self, budget: int, new: list[NewSequence], prefills: list[Span]) -> None:
        """Move waiting requests to the running ones while budget, places and blocks last."""
        running = self._running
        while budget and len(running) < self.max_running:
            request = self._waiting.head()
            if request is None:
                return
            tokens = len(request.token_ids)
            blocks = -(-tokens // self.block_size)
            # One block for each running sequence is left to grow into: else the newcomer would soon be preempted.
            # Nobody is passed over for want of blocks, or a long prompt would wait for ever.
            if blocks + len(running) > self._pool.num_free and (running or blocks > self._pool.num_free):
                return
            self._waiting.remove(request)
            request.status = Status.RUNNING
            request.key = self._next_key
            self._next_key += 1
            request.block_ids = self._pool.allocate(blocks)
            self._by_key[request.key] = request
            insort(running, request, key=_order)
            start = request.num_computed
            count = min(tokens - start, budget)
            budget -= count
            new.append(NewSequence(request.key, request.token_ids.copy(), request.sampling, request.num_prompt))
            prefills.append(Span(request.key, start, count, [request.block_ids.copy()], start + count == tokens))

    def _preempt_last(self) -> None:
        request = self._running.pop()
        self._release(request, Status.WAITING)
        self._waiting.push_front(request)
        self._preemptions += 1

    def _release(self, request: Request, status: Status) -> None:
        """Give back all that a running request holds, here and in the runner."""
        request.status = status
        self._pool.free(request.block_ids)
        request.block_ids = []
        request.num_computed = 0
        self._retired.append(request.key)
        del self._by_key[request.key]
        request.key = -1


def _order(request: Request) -> tuple[int, int]:
    return request.order


class WaitingQueue:
    """Waiting requests by class, then arrival; every operation O(1) for a fixed set of classes."""

    def __init__(self) -> None:
        self._classes: dict[int, OrderedDict[str, Request]] = {}
        self._priorities: list[int] = []
        """Classes that hold requests, first one first."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        """Queue a request that arrived after all others."""
        queue = self._classes.get(request.priority)
        if queue is None:
            queue = self._classes[request.priority] = OrderedDict()
            insort(self._priorities, request.priority)
        queue[request.request_id] = request
        self._size += 1

    def push_front(self, request: Request) -> None:
        """Queue a preempted request: it arrived before every other of its class that waits."""
        self.push(request)
        self._classes[request.priority].move_to_end(request.request_id, last=False)

    def head(self) -> Request | None:
        """Who is next."""
        if not self._priorities:
            return None
        return next(iter(self._classes[self._priorities[0]].values()))

    def remove(self, request: Request) -> None:
        queue = self._classes[request.priority]
        del queue[request.request_id]
        self._size -= 1
        if not queue:
            del self._classes[request.priority]
            self._priorities.remove(request.priority)
