"""Whose prompt comes next in the step being planned, and how many tokens of it."""

from __future__ import annotations

from operator import attrgetter

from worker.engine.admission import Admission
from worker.engine.fairness import Tenant
from worker.engine.request import Request, Status
from worker.engine.roster import Roster
from worker.engine.waiting_queue import WaitingQueue


class Turns:
    """Gives prompts their turns, by class, then least served tenant, then arrival. Who waits is admitted in its turn.

    Short prompts do not wait for the long ones of their tenant (long: more than ``Roster.most_short`` tokens to
    compute). In the turn of a long one the short ones go first, and leave it half of what there is; the tenant's next
    long one has a turn in the same step only when no short one is left. So long ones go in the order of arrival, and
    one that has begun gets on in each step that its tenant has a part in.

    When a prompt can't be admitted, nobody behind it is; but short ones of its tenant may pass a long one, as far as
    ``Admission.spare_beside`` lets them.
    """

    def __init__(
        self, roster: Roster, admission: Admission, step: int, started: list[Request], *, max_prefill: int, admits: bool
    ) -> None:
        """``started``: prompts that hold blocks; ``admits``: whether those that wait may be admitted."""
        self._roster = roster
        self._admission = admission
        self._step = step
        self._max_prefill = max_prefill
        self._started = WaitingQueue(roster.most_short)
        for request in sorted(started, key=attrgetter("arrival")):
            self._started.push(request)
        self._admits = admits
        self._passed: Request | None = None
        """The long prompt that could not be admitted, if others of its tenant may be."""
        self._spare = 0
        """Blocks that those may come to hold."""
        self._long: Request | None = None
        """Whose turn it is, while short ones go before it."""
        self._kept = 0
        """How much of the budget short ones leave to it,"""
        self._kept_in_others_turn = 0
        """and how much once it would be another tenant's turn: theirs and its own are then no more than its alone."""
        self._had_long: set[Tenant] = set()

    def next(self, budget: int) -> tuple[Request, int] | None:
        """Who is next, and how many of ``budget`` tokens it may have; None if nobody can run."""
        while True:
            if self._long is None:
                request = self._first()
                if request is None:
                    return None
                if request.tenant in self._had_long and self._is_long(request):
                    request = self._first(request.tenant) or request
                if not self._take(request):
                    continue
                if not self._is_long(request):
                    return request, budget
                self._begin(request, budget)
                continue
            tenant = self._long.tenant
            short = self._first(tenant)
            if short is not None and (most := self._left(budget, tenant)) > 0:
                if self._take(short):
                    return short, most
                continue
            request, self._long = self._long, None
            if request.status is not Status.WAITING:  # it was not preempted
                return request, budget

    def _begin(self, long: Request, budget: int) -> None:
        self._long = long
        self._had_long.add(long.tenant)
        self._kept = min((budget + 1) // 2, self._max_prefill)
        self._kept_in_others_turn = self._kept + max(0, budget - self._max_prefill)

    def _left(self, budget: int, tenant: Tenant) -> int:
        """Tokens for the short prompts that go before a long one."""
        first = self._first()
        own_turn = first is None or first.tenant is tenant
        return budget - (self._kept if own_turn else self._kept_in_others_turn)

    def _is_long(self, request: Request) -> bool:
        return request.num_left > self._roster.most_short

    def _first(self, short_of: Tenant | None = None) -> Request | None:
        """Who goes first: of all, or of one tenant's short prompts."""
        while True:
            started = self._started.head() if short_of is None else self._started.short(short_of)
            if started is None or started.status is not Status.WAITING:
                break
            self._started.remove(started)  # it was preempted
        waiting = self._first_waiting(short_of)
        if started is None or waiting is None:
            return started or waiting
        return min(started, waiting, key=attrgetter("order"))

    def _first_waiting(self, short_of: Tenant | None) -> Request | None:
        queue = self._roster.waiting
        if self._admits:
            return queue.head() if short_of is None else queue.short(short_of)
        if self._passed is None or short_of not in (None, self._passed.tenant):
            return None
        short = queue.short(self._passed.tenant)
        return None if short is None or self._admission.most_blocks(short) > self._spare else short

    def _take(self, request: Request) -> bool:
        """Take a request off its queue; whether it can be computed now."""
        waits = request.status is Status.WAITING
        if not waits:
            self._started.remove(request)
            return True
        if self._admission.admit(request, self._step):
            if self._passed is not None:
                self._spare -= self._admission.most_blocks(request)
            return request.status is Status.LOADED
        self._passed = None
        if self._admits and self._is_long(request) and self._roster.waiting.short(request.tenant) is not None:
            self._passed = request
            self._spare = self._admission.spare_beside(request)
        self._admits = False
        return False
