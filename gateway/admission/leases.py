"""Leases of running requests: renewed by their gateway, swept by any, and put back when Redis lost them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from functools import partial
from uuid import UUID

from gateway.admission import keys
from gateway.admission.periods import to_ms
from gateway.admission.redis import Argument, RedisClient
from gateway.admission.scripts import EXPIRE, OPEN, RENEW, RESTORE
from gateway.admission.settlements import Settlements
from gateway.admission.ticket import Ticket, encode

log = logging.getLogger(__name__)

_RENEWALS_PER_CALL = 100
_EXPIRIES_PER_CALL = 100


class Leases:
    """The running requests of this gateway, and the state of the shards they live in.

    A shard has an *epoch*, the time from which it admits. A shard without one was emptied (or never used): whoever
    finds that sets an epoch ``opening_ms`` ahead, so that every gateway learns of it by its next heartbeat and brings
    back its running requests and its last settlements before anything new is admitted.
    """

    def __init__(
        self,
        redis: RedisClient,
        settlements: Settlements,
        *,
        lease_ms: int,
        tombstone_ms: int,
        opening_ms: int,
        longest_s: float,
    ) -> None:
        self._redis = redis
        self._settlements = settlements
        self._lease_ms = lease_ms
        self._tombstone_ms = tombstone_ms
        self._opening_ms = opening_ms
        self._longest_s = longest_s
        self._live: dict[UUID, Ticket] = {}
        self._epochs: dict[str, bytes] = {}

    @property
    def open(self) -> int:
        """Requests that are admitted here and not settled yet."""
        return len(self._live)

    def add(self, ticket: Ticket) -> None:
        self._live[ticket.request_id] = ticket

    def remove(self, request_id: UUID) -> None:
        self._live.pop(request_id, None)

    async def learn_epochs(self) -> None:
        """Read the epochs of all shards; open those of a Redis never used. Raises RedisUnavailable when some did not
        answer, once the others are done."""
        asked = [self._redis.issue("GET", keys.epoch(shard)) for shard in keys.ALL_SHARDS]
        epochs = await asyncio.gather(*asked, return_exceptions=True)
        if not any(epochs):
            # No shard at all: taken for new, since waiting would hold up every first start. Were it emptied just now,
            # the other gateways still bring everything back by their next heartbeat.
            await asyncio.gather(*(self._open(shard, 0) for shard in keys.ALL_SHARDS))
            return
        for shard, epoch in zip(keys.ALL_SHARDS, epochs, strict=True):
            if epoch is None:
                await self._open(shard, self._opening_ms)
            elif not isinstance(epoch, BaseException):
                self._epochs.setdefault(shard, epoch)
        _raise_first(epochs)

    async def reopen(self, shard: str) -> None:
        """The shard was emptied: bring back what this gateway holds, and let the others do so before it admits."""
        log.warning("the shard %s of Redis is empty; it is being restored", shard)
        await self._open(shard, self._opening_ms)
        self._settlements.resend(shard)
        await self._restore([ticket for ticket in self._live.values() if ticket.principal.shard == shard])

    async def renew(self) -> None:
        """The heartbeat: renew all leases of this gateway, write its checkpoints, notice what Redis lost."""
        outcomes: list[object] = []
        if len(self._epochs) < len(keys.ALL_SHARDS):  # Redis, or a node of the cluster, was away at start
            outcomes += await asyncio.gather(self.learn_epochs(), return_exceptions=True)
        shards: dict[str, list[Ticket]] = {shard: [] for shard in self._settlements.recent_shards()}
        for ticket in list(self._live.values()):
            if ticket.age_s > self._longest_s:
                log.error("request %s was never settled; its lease is left to the janitor", ticket.request_id)
                self.remove(ticket.request_id)
            else:
                shards.setdefault(ticket.principal.shard, []).append(ticket)
        renewals = (self._renew_shard(shard, tickets) for shard, tickets in shards.items())
        outcomes += await asyncio.gather(*renewals, return_exceptions=True)
        _raise_first(outcomes)

    async def expire(self) -> int:
        """Settle, in all shards, requests whose gateway fell silent. Returns how many."""
        shards: Iterable[str] = keys.ALL_SHARDS
        settled, faults = 0, []
        while shards:
            calls = {
                shard: self._redis.run(
                    EXPIRE,
                    (keys.leases(shard), keys.usage(shard), keys.alerts(shard)),
                    (self._redis.time_offset_ms, keys.prefix(shard), _EXPIRIES_PER_CALL, self._tombstone_ms),
                )
                for shard in shards
            }
            outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
            faults += [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            replies = {
                shard: reply
                for shard, reply in zip(calls, outcomes, strict=True)
                if not isinstance(reply, BaseException)
            }
            for reply in replies.values():
                settled += len(reply) - 1
                for request_id in reply[1:]:
                    log.warning("request %s was settled as abandoned: its lease ran out", request_id.decode())
            shards = [shard for shard, reply in replies.items() if reply[0] >= _EXPIRIES_PER_CALL]
        _raise_first(faults)
        return settled

    async def _renew_shard(self, shard: str, tickets: list[Ticket]) -> None:
        for at in range(0, max(1, len(tickets)), _RENEWALS_PER_CALL):
            batch = tickets[at : at + _RENEWALS_PER_CALL]
            arguments: list[Argument] = [self._redis.time_offset_ms, self._lease_ms, keys.prefix(shard)]
            kept = []
            for ticket in batch:
                event, charged, tokens = b"", 0, 0
                if (unsaved := ticket.unsaved()) is not None:
                    usage, row = unsaved
                    event, charged = encode(row), row.charged_nano_usd
                    tokens = row.prompt_tokens + row.completion_tokens
                    kept.append(partial(ticket.saved, usage))
                arguments += (ticket.id_text, str(ticket.principal.tenant_id), event, charged, tokens)
            reply = await self._redis.run(RENEW, (keys.epoch(shard), keys.leases(shard)), arguments)
            for saved in kept:
                saved()
            told = {request_id.decode() for request_id in reply[1:]}
            for ticket in batch:
                ticket.resumed = ticket.resumed or f"+{ticket.request_id}" in told
            await self._restore([ticket for ticket in batch if str(ticket.request_id) in told])
            await self._note_epoch(shard, reply[0])

    async def _note_epoch(self, shard: str, epoch: bytes) -> None:
        if not epoch:
            await self.reopen(shard)
        elif self._epochs.setdefault(shard, epoch) != epoch:
            self._epochs[shard] = epoch
            self._settlements.resend(shard)

    async def _open(self, shard: str, wait_ms: int) -> None:
        arguments = (self._redis.time_offset_ms, wait_ms)
        self._epochs[shard], _ = await self._redis.run(OPEN, (keys.epoch(shard),), arguments)

    async def _restore(self, tickets: Collection[Ticket]) -> None:
        calls = []
        for ticket in tickets:
            if ticket.request_id not in self._live or ticket.resumed:
                continue  # settled meanwhile, and a settlement needs no reservation
            row, spelled = ticket.abandoned(), keys.of_tenant(ticket.principal.tenant_id)
            calls.append(
                self._redis.run(
                    RESTORE,
                    (
                        spelled.tenant,
                        spelled.live,
                        spelled.request(ticket.request_id),
                        spelled.leases,
                    ),
                    (
                        self._redis.time_offset_ms,
                        self._lease_ms,
                        str(ticket.request_id),
                        spelled.id,
                        to_ms(ticket.admitted_at),
                        ticket.bound.nano_usd,
                        ticket.bound.tokens,
                        row.charged_nano_usd,
                        row.prompt_tokens + row.completion_tokens,
                        encode(row),
                        ticket.hold.counters,
                        ticket.hold.end_user,
                        ticket.hold.who,
                    ),
                )
            )
        if calls:
            log.warning("Redis lost %d running requests; they are put back", len(calls))
            await asyncio.gather(*calls)


def _raise_first(outcomes: Iterable[object]) -> None:
    """After all is done that could be: the nodes of a cluster that are well must not wait for one that is not."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
