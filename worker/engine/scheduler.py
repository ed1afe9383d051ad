"""Who runs in the next step, how many of its tokens, in which blocks."""

from __future__ import annotations

import time
from collections.abc import Callable

from worker.engine.admission import Admission
from worker.engine.compute_cost import CostModel
from worker.engine.deadlines import Deadlines
from worker.engine.kv_cache import KVCache
from worker.engine.messages import EngineOutput, EngineRequest, EngineStats
from worker.engine.plan import NewSequence, Span, StepPlan, StepResult, TransferResult
from worker.engine.preemption import last_in_order
from worker.engine.request import QueueFull, Request, RequestRejected, Status
from worker.engine.retirement import Accept, Retirement
from worker.engine.roster import Roster, Step
from worker.engine.turns import Turns

_NO_BLOCKS: list[list[int]] = []


class Scheduler:
    """Shares one token budget among all requests, step after step: ``schedule``, run the plan, ``update``.

    Decodes go first. What is left of the budget goes to prompts, running ones and waiting ones, in order of class, then
    least served tenant, then arrival; only that short ones need not wait for the long ones of their tenant
    (``worker.engine.turns``). A request is admitted when blocks for every token it knows are free, so that only the
    growth of decodes can use the pool up; then the last running request in that same order is preempted: it gives back
    its blocks, keeps its tokens, waits before those of its tenant that came later and is recomputed, as far as the
    prefix cache does not hold it.

    Every request ends: ``add`` refuses what would not fit into the whole pool, a preemption for want of blocks lets
    another request draw a token, and displacements are bounded (``worker.engine.preemption``).

    With ``depth`` 2 a step is planned while the one before it is in flight.
    """

    def __init__(
        self,
        kv: KVCache,
        *,
        max_batched_tokens: int,
        max_running: int,
        max_waiting: int,
        max_prefill_per_request: int | None = None,
        fair: bool = True,
        depth: int = 1,
        costs: CostModel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_waiting`` requests may be open beyond ``max_running``; ``clock`` gives seconds."""
        if not 1 <= max_running <= max_batched_tokens:
            raise ValueError(
                f"max_running is {max_running} and max_batched_tokens {max_batched_tokens}: "
                "each running sequence needs one token of a step"
            )
        if max_prefill_per_request is not None and max_prefill_per_request < 1:
            raise ValueError(f"max_prefill_per_request is {max_prefill_per_request}; a prompt needs 1 token of a step")
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.max_open = max_running + max_waiting
        self.max_prefill = min(max_prefill_per_request or max_batched_tokens, max_batched_tokens)
        self.depth = depth
        self._clock = clock
        self._kv = kv
        self._costs = costs or CostModel(0)
        self._roster = Roster(kv, most_short=(max_batched_tokens + 1) // 2, fair=fair)
        self._admission = Admission(kv, self._roster, max_running)
        self._retirement = Retirement(self._roster, self._costs)
        self._deadlines = Deadlines()
        self._steps = 0
        self._next_key = 0
        self._claimed = 0
        """Blocks due that running requests wait for, in the plan being made."""

    @property
    def has_requests(self) -> bool:
        return bool(self._roster.open)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and not retired."""
        return len(self._roster.in_flight)

    @property
    def stats(self) -> EngineStats:
        roster, kv = self._roster, self._kv
        return EngineStats(
            running=len(roster.running),
            waiting=roster.num_waiting,
            kv_usage=kv.usage,
            steps=self._steps,
            preemptions=roster.preemptions,
            step_us=self._retirement.step_us,
            overhead_us=self._retirement.overhead_us,
            computed_tokens=self._retirement.computed_tokens,
            cache_queries=self._admission.cache_queries,
            cache_hits=self._admission.cache_hits,
            host_hits=self._admission.host_hits,
            cached_blocks=kv.cached_blocks,
            waiting_for_kv=len(roster.loading),
        )

    def add(
        self, request: EngineRequest, *, queue_timeout_s: float | None = None, deadline_s: float | None = None
    ) -> None:
        """Queue a request; one with a grammar is held until ``release_held``.

        The times are for a request that names none of its own. Raises RequestRejected when it could never fit,
        QueueFull when too many are open.
        """
        total = len(request.prompt_token_ids) + request.max_tokens
        if total > self._kv.max_sequence_tokens:
            raise RequestRejected(
                f"Prompt and max_tokens make {total} tokens; the KV cache holds {self._kv.max_sequence_tokens}. "
                "Shorten the prompt or lower max_tokens."
            )
        if request.request_id not in self._roster.open and len(self._roster.open) >= self.max_open:
            raise QueueFull(f"The engine already has {self.max_open} requests open. Try again in a moment.")
        record = self._roster.add(request, self._clock())
        self._deadlines.add(
            record,
            queue_timeout_s if request.queue_timeout_s is None else request.queue_timeout_s,
            deadline_s if request.deadline_s is None else request.deadline_s,
        )

    def release_held(self, request_id: str) -> None:
        """A request's grammar is ready: it may run. Unknown ids are ignored."""
        request = self._roster.open.get(request_id)
        if request is not None and request.status is Status.HELD:
            self._roster.release_held(request)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; whether it was open.

        Its blocks are free at once, but while a step that touches them is in flight: then when ``update`` retires
        that step.
        """
        request = self._roster.open.get(request_id)
        if request is None:
            return False
        self._roster.finish(request)
        self._roster.sweep()
        return True

    def expire(self) -> list[EngineOutput]:
        """End the requests that ran out of time; the last output of each."""
        due = self._deadlines.due(self._clock())
        outputs = []
        for request, waited_too_long in due:
            self._roster.finish(request)
            if waited_too_long:
                message = "The engine is busy: the request waited longer than it may for its first step. Try again."
                outputs.append(EngineOutput(request.request_id, [], "error", message, error_kind="queue_timeout"))
            else:
                outputs.append(EngineOutput(request.request_id, [], "length"))
        if due:
            self._roster.sweep()
        return outputs

    def transfer_done(self, result: TransferResult) -> None:
        """Blocks have come from another tier, or gone to it; who waited for them can run."""
        self._admission.transfer_done(result)

    def schedule(self) -> StepPlan | None:
        """The next step; None if nothing can run. Raises RuntimeError while ``depth`` steps are in flight."""
        roster = self._roster
        if len(roster.in_flight) >= self.depth:
            raise RuntimeError("the step in flight has not been retired")
        self._claimed = 0
        roster.preempted.clear()
        number = self._steps + 1
        decodes: list[Request] = []
        prefills: list[Request] = []
        growing: list[Request] = []
        for request in roster.running:
            start = request.num_scheduled
            remaining = request.num_tokens - start
            if remaining == 1 and start >= request.num_prompt:
                decodes.append(request)
                if start == request.num_slots:
                    growing.append(request)
            elif remaining:
                prefills.append(request)
        gained, stalled = self._grow(growing, number)
        open_door = not stalled and not roster.preempted
        if not open_door:
            decodes = [request for request in decodes if request.key >= 0 and request not in stalled]
            prefills = [request for request in prefills if request.key >= 0]
        new: list[NewSequence] = []
        chunks: list[Span] = []
        chunked: list[Request] = []
        self._fill(number, self.max_batched_tokens - len(decodes), prefills, open_door, new, chunks, chunked)
        if roster.preempted:
            decodes = [request for request in decodes if request.key >= 0]
        spans, units = self._decode(decodes, gained, number)
        if not spans and not chunks:
            return None
        num_tokens = len(spans)
        num_draws = len(spans)
        for span in chunks:
            num_tokens += span.count
            num_draws += span.sample
            units.append(self._costs.units(span.start, span.start + span.count))
        self._steps = number
        plan = StepPlan(number, new, spans + chunks, roster.retired_keys)
        roster.retired_keys = []
        roster.in_flight.append(Step(plan, decodes + chunked, units, num_tokens, num_draws))
        return plan

    def grammar_rows(self) -> list[tuple[int, str]]:
        """Which draws of the plan made last must follow a grammar: (index among its spans with ``sample``, request)."""
        if not self._roster.num_grammars:
            return []
        step = self._roster.in_flight[-1]
        drawing = (request for span, request in zip(step.plan.spans, step.requests, strict=True) if span.sample)
        return [(row, request.request_id) for row, request in enumerate(drawing) if request.has_grammar]

    def update(
        self, plan: StepPlan, result: StepResult, elapsed_us: int = 0, accept: Accept | None = None
    ) -> list[EngineOutput]:
        """Retire ``plan``, the oldest in flight, with what it gave; what each request gained, its end included.

        ``elapsed_us``: the step's time, from the retirement before; ``accept``: takes the tokens of requests that have
        a grammar. What was drawn for requests that have ended in the meantime is dropped.
        """
        in_flight = self._roster.in_flight
        if not in_flight or plan is not in_flight[0].plan:
            raise RuntimeError(f"step {plan.step} is not the next to retire")
        if len(result.tokens) != in_flight[0].num_draws:
            raise RuntimeError(f"step {plan.step} drew {len(result.tokens)} tokens, not one for each span that samples")
        return self._retirement.retire(result, elapsed_us, accept)

    def check(self) -> None:
        """Raise IntegrityError if a block is lost, or held by nobody who is known."""
        self._kv.check()

    def _grow(self, growing: list[Request], number: int) -> tuple[dict[int, list[list[int]]], set[Request]]:
        """Find a block for each decode that begins one, preempting others if need be.

        What each gained, by key, and those that must wait for blocks that a step in flight or a transfer still touches.
        """
        gained: dict[int, list[list[int]]] = {}
        stalled: set[Request] = set()
        for request in growing:
            if request.key < 0:
                continue  # it was preempted for one before it
            key = request.key
            blocks = self._extend(request, request.num_scheduled + 1, number)
            if blocks is not None:
                gained[key] = blocks
            else:
                stalled.add(request)
        return gained, stalled

    def _extend(self, request: Request, num_tokens: int, number: int) -> list[list[int]] | None:
        """Blocks so that ``num_tokens`` fit; None if the request can't go on in this step."""
        kv, roster = self._kv, self._roster
        while (gained := kv.extend(request.blocks, num_tokens)) is None:
            if roster.blocks_due + kv.leased_blocks > self._claimed:
                self._claimed += len(request.blocks.tables)
                return None
            victim = last_in_order(other for other in roster.running if other.last_step != number)
            if victim is None:
                return None
            roster.preempt(victim)
            if victim is request:
                return None
        request.num_slots = request.blocks.room
        return gained

    def _decode(
        self, decodes: list[Request], gained: dict[int, list[list[int]]], number: int
    ) -> tuple[list[Span], list[int]]:
        """Spans of one token each, and what they cost. The hot loop: no calls in it that can be avoided."""
        spans = []
        units = []
        dense = self._costs.dense
        for request in decodes:
            start = request.num_scheduled
            end = start + 1
            request.num_scheduled = end
            if end < request.ahead_limit:
                request.num_tokens = end + 1
            request.last_step = number
            tenant = request.tenant
            tenant.served += tenant.draw_charge
            key = request.key
            spans.append(Span(key, start, 1, gained.get(key, _NO_BLOCKS), True))
            units.append(dense + end)
        return spans, units

    def _fill(
        self,
        number: int,
        budget: int,
        prefills: list[Request],
        open_door: bool,
        new: list[NewSequence],
        chunks: list[Span],
        chunked: list[Request],
    ) -> None:
        """Spend the budget on prompts, in order, and admit who waits while it lasts."""
        roster = self._roster
        started = prefills + roster.loaded
        if not started and not len(roster.waiting):
            return
        turns = Turns(roster, self._admission, number, started, max_prefill=self.max_prefill, admits=open_door)
        while budget and (turn := turns.next(budget)) is not None:
            request, most = turn
            span = self._chunk(request, most, number, new)
            if span is not None:
                budget -= span.count
                chunks.append(span)
                chunked.append(request)

    def _chunk(self, request: Request, budget: int, number: int, new: list[NewSequence]) -> Span | None:
        """The next tokens of a prompt, or of what preemption took; None if there are no blocks for them."""
        start = request.num_scheduled
        end = start + min(request.num_tokens - start, budget, self.max_prefill)
        gained = _NO_BLOCKS
        if end > request.num_slots:
            more = self._extend(request, end, number)
            if more is None:
                return None
            gained = more
        if request.status is Status.LOADED:
            self._roster.start(request, self._next_key)
            self._next_key += 1
            gained = [table.copy() for table in request.blocks.tables]
            tokens = request.token_ids.copy()
            new.append(NewSequence(request.key, tokens, request.sampling, request.num_prompt, request.pooling))
            if request.queued_us is None:
                request.queued_us = max(0, round((self._clock() - request.arrived_at) * 1e6))
        tenant = request.tenant
        prompt_end = min(end, request.num_prompt)
        charged = max(start, request.num_charged)
        if prompt_end > charged:
            tenant.charge_prompt(prompt_end - charged)
            request.num_charged = prompt_end
        sample = end == request.num_tokens and request.pooling is None
        if sample:
            tenant.served += tenant.draw_charge
            if end < request.ahead_limit:
                request.num_tokens = end + 1
        request.num_scheduled = end
        request.last_step = number
        return Span(request.key, start, end - start, gained, sample)
