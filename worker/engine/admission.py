"""Who may begin: blocks for the first of the waiting, with what the cache already holds of its text."""

from __future__ import annotations

from worker.engine.kv_cache import KVCache
from worker.engine.plan import TransferResult
from worker.engine.preemption import displaceable
from worker.engine.request import Request
from worker.engine.roster import Roster


class Admission:
    """Moves waiting requests to the running ones, at most ``max_running`` at a time."""

    def __init__(self, kv: KVCache, roster: Roster, max_running: int) -> None:
        self.cache_queries = 0
        """Prompt tokens looked up in the prefix cache; found there; of these, in the host tier."""
        self.cache_hits = 0
        self.host_hits = 0
        self._kv = kv
        self._roster = roster
        self._max_running = max_running
        self._admitted = 0

    def admit(self, request: Request, step: int) -> bool:
        """Give one of the waiting a place and blocks in plan ``step``, displacing others if it may; whether it
        has them."""
        roster = self._roster
        if request in roster.preempted or request.last_step > roster.retired_step:
            return False  # preempted just now; its last draw may be in flight
        while roster.num_places >= self._max_running or not self._place(request):
            if roster.num_places < self._max_running and roster.blocks_due:
                return False  # blocks are coming
            victim = displaceable(roster.running, request, roster.tenants, step)
            if victim is None:
                return False
            roster.preempt(victim)
        return True

    def most_blocks(self, request: Request) -> int:
        """Blocks that a request may come to hold, and keep free to grow into."""
        return self._kv.most_blocks(request.limit) + len(request.blocks.tables)

    def spare_beside(self, request: Request) -> int:
        """Blocks that may be given to others while ``request``, whose turn it is, waits for its own.

        Beside all that those may come to hold who came after it, the pool must have room for it: who passes it does
        not keep it waiting. It has its blocks, at the latest, when those are gone that held some when its turn came.
        """
        later = sum(self.most_blocks(other) for other in self._roster.placed() if other.arrival > request.arrival)
        return self._kv.capacity - self._kv.most_blocks(len(request.token_ids)) - later

    def transfer_done(self, result: TransferResult) -> None:
        """Blocks have come from another tier, or gone to it; who waited for them can run."""
        for blocks in self._kv.transfer_done(result):
            request = self._roster.end_load(blocks)
            lost = request.cached_tokens - blocks.loaded_tokens
            if request.queued_us is None and lost:
                self.cache_hits -= lost
                self.host_hits -= min(lost, request.host_tokens)
                request.cached_tokens = blocks.loaded_tokens

    def _place(self, request: Request) -> bool:
        """Admit a request if there are blocks for every token it knows.

        One block for each running sequence is left to grow into: else the newcomer would soon be preempted.
        """
        kv, roster = self._kv, self._roster
        blocks = request.blocks
        reserve = len(roster.running) * len(blocks.tables) if roster.num_places else 0
        room = kv.num_free - reserve
        if request.blocked is not None:
            less_room, additions, admitted = request.blocked
            if room <= less_room and kv.additions == additions and self._admitted == admitted:
                return False
        match = kv.match(blocks, request.token_ids, read_cache=request.reads_cache)
        if kv.admit(blocks, match, len(request.token_ids), reserve=reserve) is None:
            request.blocked = (room, kv.additions, self._admitted)
            return False
        self._admitted += 1
        if request.queued_us is None:  # later it finds what was computed for itself
            request.cached_tokens, request.host_tokens = match.tokens, match.host_tokens
            if request.reads_cache:
                self.cache_queries += request.num_prompt
            self.cache_hits += match.tokens
            self.host_hits += match.host_tokens
        roster.admit(request, match.tokens, loading=match.host_tokens > 0)
        return True
