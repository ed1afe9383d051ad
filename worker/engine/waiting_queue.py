"""Requests that wait for their first step, or for their next after preemption."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace

from worker.engine.fairness import Tenant
from worker.engine.request import Request


class WaitingQueue:
    """Waiting requests by class, then least served tenant, then arrival. O(log tenants) an operation, amortised."""

    def __init__(self) -> None:
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
        queue.of(request.tenant)[request.request_id] = request
        self._size += 1

    def push_front(self, request: Request) -> None:
        """Queue a preempted request before every other of its tenant."""
        self.push(request)
        self._classes[request.priority].of(request.tenant).move_to_end(request.request_id, last=False)

    def head(self) -> Request | None:
        """Who is next."""
        return self._classes[self._priorities[0]].head() if self._priorities else None

    def remove(self, request: Request) -> None:
        queue = self._classes[request.priority]
        queue.remove(request)
        self._size -= 1
        if not queue.requests:
            del self._classes[request.priority]
            self._priorities.remove(request.priority)


class _Class:
    """One class: a queue for each tenant, and a heap of tenants by counter.

    Counters grow while their tenants wait, and never shrink: an entry that is out of date stands too early, so it
    comes to the top and is corrected there.
    """

    def __init__(self) -> None:
        self.requests: dict[Tenant, OrderedDict[str, Request]] = {}
        self._heap: list[tuple[float, tuple[bool, int], Tenant]] = []

    def of(self, tenant: Tenant) -> OrderedDict[str, Request]:
        queue = self.requests.get(tenant)
        if queue is None:
            queue = self.requests[tenant] = OrderedDict()
            heappush(self._heap, (tenant.served, tenant.rank, tenant))
        return queue

    def head(self) -> Request:
        heap = self._heap
        while True:
            served, rank, tenant = heap[0]
            queue = self.requests.get(tenant)
            if queue is None:
                heappop(heap)
            elif served != tenant.served or rank != tenant.rank:
                heapreplace(heap, (tenant.served, tenant.rank, tenant))
            else:
                return next(iter(queue.values()))

    def remove(self, request: Request) -> None:
        queue = self.requests[request.tenant]
        del queue[request.request_id]
        if not queue:
            del self.requests[request.tenant]
            if len(self._heap) > 2 * len(self.requests) + 16:
                self._heap = [(tenant.served, tenant.rank, tenant) for tenant in self.requests]
                heapify(self._heap)
