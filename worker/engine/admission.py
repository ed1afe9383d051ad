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
        self._blocked: tuple[Request, int, int] | None = None
        """Who could not be admitted, how many blocks it could have had, and how many had got names by then."""

    def admit(self, request: Request, step: int) -> bool:
        """Give the first of the waiting a place and blocks in plan ``step``, displacing others if it may; whether it
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

        One block for each running sequence is left to grow into: else the newcomer would soon be preempted. Nobody is
        passed over for want of blocks, or a long prompt would wait for ever.
        """
        kv, roster = self._kv, self._roster
        blocks = request.blocks
        reserve = len(roster.running) * len(blocks.tables) if roster.num_places else 0
        room = kv.num_free - reserve
        if self._blocked is not None:
            blocked, less_room, additions = self._blocked
            if blocked is request and room <= less_room and kv.additions == additions:
                return False
        match = kv.match(blocks, request.token_ids, read_cache=request.reads_cache)
        if kv.admit(blocks, match, len(request.token_ids), reserve=reserve) is None:
            self._blocked = (request, room, kv.additions)
            return False
        self._blocked = None
        if request.queued_us is None:  # later it finds what was computed for itself
            request.cached_tokens, request.host_tokens = match.tokens, match.host_tokens
            if request.reads_cache:
                self.cache_queries += request.num_prompt
            self.cache_hits += match.tokens
            self.host_hits += match.host_tokens
        roster.admit(request, match.tokens, loading=match.host_tokens > 0)
        return True
