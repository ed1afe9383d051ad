"""Requests in the order in which they go, with a lane for short prompts."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from itertools import takewhile

from worker.engine.fairness import Tenant
from worker.engine.request import Request


class WaitingQueue:
    """Requests that wait: for a place, or those that have one for their share of a step.

    By class, then least served tenant, then arrival; of each tenant the short prompts, besides, among themselves.
    O(log tenants) an operation, amortised.
    """

    def __init__(self, most_short: int) -> None:
        """A prompt is short with up to ``most_short`` tokens to compute when it is queued."""
        self._most_short = most_short
        self._classes: dict[int, _Class] = {}
        self._priorities: list[int] = []
        """Classes that hold requests, first one first."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        """Queue a request that arrived after all others of its tenant."""
        queue = self._classes.get(request.priority)
        if queue is None:
            queue = self._classes[request.priority] = _Class()
            insort(self._priorities, request.priority)
        line = queue.of(request.tenant)
        line.all[request.request_id] = request
        if request.num_left <= self._most_short:
            line.short[request.request_id] = request
        self._size += 1

    def put_back(self, request: Request) -> None:
        """Queue a preempted request before every other of its tenant, but those that it had passed."""
        self.push(request)
        line = self._classes[request.priority].of(request.tenant)
        _to_its_place(line.all, request)
        if request.request_id in line.short:
            _to_its_place(line.short, request)

    def head(self) -> Request | None:
        """Who is next."""
        return self._classes[self._priorities[0]].head() if self._priorities else None

    def short(self, tenant: Tenant) -> Request | None:
        """Who is next of a tenant's short prompts."""
        queue = self._classes.get(tenant.priority)
        line = None if queue is None else queue.lines.get(tenant)
        return None if line is None else next(iter(line.short.values()), None)

    def remove(self, request: Request) -> None:
        queue = self._classes[request.priority]
        queue.remove(request)
        self._size -= 1
        if not queue.lines:
            del self._classes[request.priority]
            self._priorities.remove(request.priority)


def _to_its_place(queue: OrderedDict[str, Request], request: Request) -> None:
    passed = list(takewhile(lambda other: other.arrival < request.arrival, queue.values()))
    for other in (request, *reversed(passed)):
        queue.move_to_end(other.request_id, last=False)


class _Line:
    """The requests of one tenant in one class."""

    __slots__ = ("all", "short")

    def __init__(self) -> None:
        self.all: OrderedDict[str, Request] = OrderedDict()
        self.short: OrderedDict[str, Request] = OrderedDict()


class _Class:
    """One class: a line for each tenant, and a heap of tenants by counter.

    Counters grow while their tenants wait, and never shrink: an entry that is out of date stands too early, so it
    comes to the top and is corrected there.
    """

    def __init__(self) -> None:
        self.lines: dict[Tenant, _Line] = {}
        self._heap: list[tuple[float, tuple[bool, int], Tenant]] = []

    def of(self, tenant: Tenant) -> _Line:
        line = self.lines.get(tenant)
        if line is None:
            line = self.lines[tenant] = _Line()
            heappush(self._heap, (tenant.served, tenant.rank, tenant))
        return line

    def head(self) -> Request:
        heap = self._heap
        while True:
            served, rank, tenant = heap[0]
            line = self.lines.get(tenant)
            if line is None:
                heappop(heap)
            elif served != tenant.served or rank != tenant.rank:
                heapreplace(heap, (tenant.served, tenant.rank, tenant))
            else:
                return next(iter(line.all.values()))

    def remove(self, request: Request) -> None:
        line = self.lines[request.tenant]
        del line.all[request.request_id]
        line.short.pop(request.request_id, None)
        if not line.all:
            del self.lines[request.tenant]
            if len(self._heap) > 2 * len(self.lines) + 16:
                self._heap = [(tenant.served, tenant.rank, tenant) for tenant in self.lines]
                heapify(self._heap)
