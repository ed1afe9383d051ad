"""Which backend first.

Usable ones before others, then by the targets' priority; among these a target by weight, so that a split holds whatever
the load; among the target's endpoints, those of the best priority, the less loaded of two drawn by weight.

What other replicas have in flight is known a moment late, and if all went for the least loaded endpoint they would meet
there (Mitzenmacher, "How Useful Is Old Information?", IEEE TPDS 11(1), 2000). Hence two draws; and a replica takes it
that since they told their loads the others have done as it did itself, in proportion to what they have in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

import msgspec
import structlog

from gateway.apis import Api
from gateway.clock import Clock
from gateway.routing.retry_budget import RetryBudgets
from gateway.routing.route import Endpoint, Target
from gateway.routing.standing import BARRED, OPEN, Health, InUse, Standing

TRIES_A_TIER = 3
"""After so many failures at targets of one priority those of the next are tried, as far as there are any."""

_NOT_AT_ALL = (BARRED,)
"""Better than any barred endpoint's rank, so that these are never taken."""
_log = structlog.get_logger(__name__)

_Group = list[tuple[Endpoint, Standing]]


class Choice(msgspec.Struct, frozen=True):
    endpoint: Endpoint
    model: str
    """The name by which it knows the model."""


class Balancer:
    """Ranks the endpoints of a route's targets. ``endpoints`` lists those of a pool that are alive."""

    def __init__(
        self, endpoints: Callable[[str], Sequence[Endpoint]], clock: Clock, *, random: Random | None = None
    ) -> None:
        self._endpoints = endpoints
        self._clock = clock
        self._random = random or Random()
        self._standings: dict[str, Standing] = {}
        self._elsewhere: Mapping[str, int] = {}
        self._overruled: frozenset[str] = frozenset()
        self._echo = 0.0
        """For each request that this replica has begun, so many may others have begun."""
        self._budgets = RetryBudgets(clock)

    def context_length(self, targets: Sequence[Target], api: Api) -> int | None:
        """The longest of the endpoints that serve ``api``; None if none is alive."""
        longest: int | None = None
        for target in targets:
            for endpoint in self._endpoints(target.pool):
                if (longest is None or endpoint.context_length > longest) and api in endpoint.apis:
                    longest = endpoint.context_length
        return longest

    def choose(
        self, targets: Sequence[Target], api: Api, *, context_length: int, tried: Sequence[str] = ()
    ) -> Choice | None:
        """The best endpoint whose id is not among ``tried``.

        If none is usable, the least bad one: a breaker that opens everywhere must not make an outage of a blip. None if
        there is none, or if all that there are asked to be left alone for a while (``wait_s`` tells).
        One that takes more tokens than ``context_length`` is left out: it could do more than was reserved for.
        """
        now = self._clock.monotonic()
        offers: list[tuple[int, Target, _Group]] = []
        tries: dict[int, int] = {}
        for target in targets:
            best: tuple[int, ...] = _NOT_AT_ALL
            group: _Group = []
            for endpoint in self._endpoints(target.pool):
                if tried and endpoint.id in tried:
                    tries[target.priority] = tries.get(target.priority, 0) + 1
                    continue
                if endpoint.context_length > context_length or api not in endpoint.apis:
                    continue
                standing = self._standing(endpoint)
                level = standing.level(now)
                if standing.unknown_models and level < OPEN:
                    level = standing.level_for(endpoint.sends_model or target.backend_model, now)
                rank = (level, endpoint.weight <= 0, endpoint.priority)
                if rank < best:
                    best = rank
                    group = [(endpoint, standing)]
                elif rank == best:
                    group.append((endpoint, standing))
            if group:
                offers.append((best[0], target, group))
        if not offers:
            return None
        _, target, group = offers[0] if len(offers) == 1 else self._draw_target(offers, tries)
        endpoint = group[0][0] if len(group) == 1 else self._less_loaded(group)
        return Choice(endpoint, endpoint.sends_model or target.backend_model)

    def wait_s(self, targets: Sequence[Target], api: Api, *, context_length: int) -> float | None:
        """Seconds until the first of those that asked to be left alone may be asked again; None if there is none."""
        now = self._clock.monotonic()
        return min(
            (
                self._standing(endpoint).aside_s(now)
                for target in targets
                for endpoint in self._endpoints(target.pool)
                if endpoint.context_length <= context_length and api in endpoint.apis
            ),
            default=None,
        )

    def began(self, route: str) -> None:
        """A request for ``route`` is about to be sent for the first time."""
        self._budgets.of(route).deposit()

    def may_retry(self, route: str) -> bool:
        """Whether the route's budget has another attempt; it is taken from it."""
        return self._budgets.of(route).withdraw()

    def using(self, endpoint: Endpoint) -> InUse:
        """A context manager that counts one request in flight at ``endpoint``."""
        return InUse(self._standing(endpoint))

    def answering(self, endpoint: Endpoint) -> None:
        """It began to give a good answer."""
        self._answered(self._standing(endpoint), self._clock.monotonic())

    def succeeded(self, endpoint: Endpoint) -> None:
        """It gave a whole answer."""
        standing = self._standing(endpoint)
        standing.succeeded_at = now = self._clock.monotonic()
        if standing.breaker.open_until == 0.0:
            standing.breaker.succeeded(now)
        else:
            self._answered(standing, now)

    def failed(
        self,
        endpoint: Endpoint,
        *,
        unhealthy: bool,
        unreachable: bool = False,
        busy: bool = False,
        unknown_model: str | None = None,
        retry_after_s: float | None = None,
        code: str = "",
    ) -> None:
        """``unhealthy``: it was the endpoint's fault. ``busy``: it refused for want of capacity, for whoever asks.

        ``unknown_model``: it does not serve this one, which is no reason not to ask it for others.
        ``retry_after_s``: so long it wants to be left alone; what says when to come back is not dead.
        ``code``: of the fault, for those who look.
        """
        standing = self._standing(endpoint)
        now = self._clock.monotonic()
        if unhealthy or busy:
            standing.note_failure(now, code)
        if unknown_model is not None:
            standing.note_unknown(unknown_model, now)
            unhealthy = False
        if busy or (unhealthy and retry_after_s is not None):
            standing.set_aside(now, retry_after_s)
        if not unhealthy:
            self._answered(standing, now)
        elif retry_after_s is None and standing.breaker.failed(now, at_once=unreachable):
            self._tell_opened(standing, now)

    def probed(self, endpoint: Endpoint, *, alive: bool) -> None:
        """The outcome of a probe."""
        standing = self._standing(endpoint)
        now = self._clock.monotonic()
        was = standing.breaker.state(now)
        if not alive:
            standing.note_failure(now, "probe_failed")
        standing.breaker.probed(now, alive=alive)
        if was == "closed" and standing.breaker.open_until:
            self._tell_opened(standing, now)

    def doubtful(self, endpoint: Endpoint) -> bool:
        """Whether its breaker is not closed, or the latest probe got no answer."""
        breaker = self._standing(endpoint).breaker
        return breaker.open_until != 0.0 or breaker.missed_probes > 0

    def idle_s(self, endpoint: Endpoint) -> float:
        """Seconds since its latest success; infinite without any."""
        succeeded_at = self._standing(endpoint).succeeded_at
        return float("inf") if succeeded_at is None else self._clock.monotonic() - succeeded_at

    def keep_only(self, alive: Iterable[Endpoint]) -> None:
        """Forget what is known of others; what runs there is still counted to its end."""
        ids = {endpoint.id for endpoint in alive}
        for id, standing in list(self._standings.items()):
            if id not in ids and not standing.in_flight:
                del self._standings[id]

    def in_flight_at(self, endpoint: Endpoint) -> int:
        """This replica's requests there."""
        return self._standing(endpoint).in_flight

    def in_flight(self) -> dict[str, int]:
        """This replica's requests, by endpoint."""
        return {id: standing.in_flight for id, standing in self._standings.items() if standing.in_flight}

    def votes(self) -> list[str]:
        """Endpoints that this replica leaves out by its own experience."""
        now = self._clock.monotonic()
        return [id for id, standing in self._standings.items() if standing.breaker.open_until > now]

    def adopt(self, in_flight: Mapping[str, int], votes: Mapping[str, int], *, replicas: int) -> None:
        """What the other replicas told, added up by endpoint. ``replicas``: how many live, with this one.

        An endpoint that more than half of them leave out is not usable for this one either.
        """
        own = sum(standing.in_flight for standing in self._standings.values())
        self._echo = min(replicas - 1, sum(in_flight.values()) / max(1, own))
        self._elsewhere = in_flight
        self._overruled = frozenset(id for id, count in votes.items() if 2 * count > replicas)
        for id, standing in self._standings.items():
            standing.elsewhere = in_flight.get(id, 0)
            standing.in_flight_then = standing.in_flight
            standing.overruled = id in self._overruled

    def snapshot(self) -> list[Health]:
        """All that were used of late, by id."""
        now = self._clock.monotonic()
        return [standing.health(now) for _, standing in sorted(self._standings.items())]

    def _standing(self, endpoint: Endpoint) -> Standing:
        standing = self._standings.get(endpoint.id)
        if standing is None:
            standing = self._standings[endpoint.id] = Standing(endpoint, self._random)
            standing.elsewhere = self._elsewhere.get(endpoint.id, 0)
            standing.overruled = endpoint.id in self._overruled
        elif standing.revision != endpoint.revision or standing.base_url != endpoint.base_url:
            standing.renew(endpoint)
        return standing

    def _draw_target(
        self, offers: list[tuple[int, Target, _Group]], tries: Mapping[int, int]
    ) -> tuple[int, Target, _Group]:
        ranks = [
            (level, target.weight <= 0, tries.get(target.priority, 0) >= TRIES_A_TIER, target.priority)
            for level, target, _ in offers
        ]
        best = min(ranks)
        equals = [offer for offer, rank in zip(offers, ranks, strict=True) if rank == best]
        return equals[self._draw([target.weight for _, target, _ in equals])]

    def _less_loaded(self, group: _Group) -> Endpoint:
        weights = [endpoint.weight for endpoint, _ in group]
        first = self._draw(weights)
        weights[first] = 0.0
        one, at_one = group[first]
        other, at_other = group[self._draw(weights, but=first)]
        load, other_load = at_one.load(self._echo), at_other.load(self._echo)
        if one.weight == other.weight:
            return one if load <= other_load else other
        return one if load * other.weight <= other_load * one.weight else other

    def _draw(self, weights: Sequence[float], *, but: int = -1) -> int:
        """An index by weight. If no weight is above 0, all are alike, but for the index ``but``."""
        total = sum(weights)
        if total <= 0:
            left = [index for index in range(len(weights)) if index != but]
            return left[int(self._random.random() * len(left))]
        mark = self._random.random() * total
        for index, weight in enumerate(weights):
            mark -= weight
            if mark < 0:
                return index
        return max(index for index, weight in enumerate(weights) if weight > 0)  # rounding

    def _answered(self, standing: Standing, now: float) -> None:
        breaker = standing.breaker
        if breaker.open_until != 0.0:
            breaker.answered(now)
            if breaker.open_until == 0.0:
                _log.info("breaker_closed", backend=standing.id, pool=standing.pool)

    def _tell_opened(self, standing: Standing, now: float) -> None:
        _log.warning(
            "breaker_opened",
            backend=standing.id,
            pool=standing.pool,
            code=standing.last_error,
            for_s=round(standing.breaker.open_until - now, 2),
        )
