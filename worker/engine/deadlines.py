"""When requests must have begun, and when they must have ended."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from worker.engine.request import Request, Status


class Deadlines:
    """The moments, in seconds on the scheduler's clock, at which open requests run out of time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, Request]] = []
        self._count = 0
        self._prune_at = 64

    def add(self, request: Request, queue_timeout_s: float | None, deadline_s: float | None) -> None:
        """Both count from the request's arrival; None: no limit."""
        if queue_timeout_s is not None:
            self._push(request.arrived_at + queue_timeout_s, True, request)
        if deadline_s is not None:
            self._push(request.arrived_at + deadline_s, False, request)

    def due(self, now: float) -> list[tuple[Request, bool]]:
        """Open requests that ran out of time, once each, with whether it was by waiting for the first step."""
        heap = self._heap
        found: dict[Request, bool] = {}
        while heap and heap[0][0] <= now:
            _, _, is_queue_timeout, request = heappop(heap)
            if not _is_over(request, is_queue_timeout):
                found.setdefault(request, is_queue_timeout)
        return list(found.items())

    def _push(self, when: float, is_queue_timeout: bool, request: Request) -> None:
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if not _is_over(entry[3], entry[2])]
            heapify(self._heap)
            self._prune_at = max(64, 2 * len(self._heap))
        self._count += 1
        heappush(self._heap, (when, self._count, is_queue_timeout, request))


def _is_over(request: Request, is_queue_timeout: bool) -> bool:
    """Whether nothing can come of the moment any more."""
    return request.status is Status.FINISHED or (is_queue_timeout and request.queued_us is not None)
