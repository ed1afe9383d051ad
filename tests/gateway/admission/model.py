"""The rules of admission in plain Python: what every limit counts, when it refuses, what each request comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from gateway.admission.periods import period_at
from gateway.admission.plan import Counter
from gateway.admission.ticket import Ticket
from gateway.billing.usage import Status
from gateway.tenants.principal import Limit, Principal
from tests.gateway.admission.support import LEASE_S

WIDTH_S = {"minute": 1, "hour": 60, "day": 1440}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Ask:
    """A request that somebody makes."""

    principal: Principal
    route: str
    end_user: str | None
    bound: int
    tokens: int


@dataclass
class Request:
    """An admitted request. Times are whole seconds since 1970, amounts nano-USD."""

    ask: Ask
    ticket: Ticket
    admitted: int
    expiry: float
    kept: tuple[int, int] = (0, 0)
    """Prompt and completion tokens that Redis knows of."""
    seen: tuple[int, int] = (0, 0)
    rows: list[tuple[str, int, int]] = field(default_factory=list)
    """Status, charged, tokens."""
    lost: bool = False
    """Nobody knows of it any more, but its handler."""
    by_gateway: bool = False
    refunded: bool = False
    resumed: bool = False
    """The janitor settled it, and then its gateway woke."""
    forgotten: bool = False
    """Redis was emptied after it was settled."""

    @property
    def open(self) -> bool:
        return not self.rows and not self.lost

    @property
    def known(self) -> bool:
        return bool(self.rows) or not self.lost

    @property
    def charged(self) -> int:
        return self.rows[-1][1] if self.rows else 0

    @property
    def tokens(self) -> int:
        return self.rows[-1][2] if self.rows else self.ask.tokens


@dataclass(frozen=True)
class Verdict:
    """``limit``: the first that refuses, or None. ``wait``: seconds until the request would pass as far as windows say;
    None: never, or another matter."""

    limit: Limit | None
    wait: int | None


def price(prompt: int, completion: int) -> int:
    return prompt * 1000 + completion * 2000


class Model:
    def __init__(self, now: int) -> None:
        self.now = now
        self.requests: list[Request] = []

    def matching(self, counter: Counter) -> Iterator[Request]:
        for request in self.requests:
            ask = request.ask
            subjects = {
                "tenant": "",
                "project": str(ask.principal.project_id),
                "key": ask.principal.key_id,
                "model": ask.route,
                "end_user": ask.end_user,
            }
            if subjects[counter.subject] == counter.target and request.known:
                yield request

    def counters(self, ask: Ask) -> list[tuple[Limit, Counter]]:
        """What a request is counted by, in the order in which limits are looked at."""
        found = []
        for metric in ("budget", "requests", "tokens", "concurrent"):
            for limit in ask.principal.tenant_limits:
                whose = {
                    "tenant": ("",),
                    "project": (str(ask.principal.project_id),),
                    "key": (ask.principal.key_id,),
                    "model": (ask.route,),
                    "end_user": () if ask.end_user is None else ("", ask.end_user),
                }
                if limit.metric == metric and limit.target in whose[limit.subject]:
                    each = limit.subject == "end_user" and not limit.target
                    target = (ask.end_user or "") if each else limit.target
                    found.append((limit, Counter(limit.metric, limit.window, limit.subject, target, each)))
        return found

    def money(self, counter: Counter, start: datetime, end: datetime) -> tuple[int, int]:
        """Spent and reserved of the requests admitted in the period."""
        inside = [each for each in self.matching(counter) if start <= _at(each.admitted) < end]
        return sum(each.charged for each in inside), sum(each.ask.bound for each in inside if each.open)

    def buckets(self, counter: Counter) -> dict[int, int]:
        """What each bucket of the window holds, the last sixty and the running one."""
        width = WIDTH_S[str(counter.window)]
        found: dict[int, int] = {}
        for each in self.matching(counter):
            bucket = each.admitted // width
            amount = each.tokens if counter.metric == "tokens" else int(not each.refunded)
            if self.now // width - bucket <= 60:
                found[bucket] = found.get(bucket, 0) + amount
        return found

    def live(self, counter: Counter) -> int:
        return sum(each.open or each.resumed for each in self.matching(counter))

    def verdict(self, ask: Ask) -> Verdict:
        refusing: list[tuple[Limit, int | None]] = []
        for limit, counter in self.counters(ask):
            over, wait = self._over(limit, counter, ask)
            if over and limit.hard:
                refusing.append((limit, wait))
        if not refusing:
            return Verdict(None, None)
        waits = [wait for _, wait in refusing]
        return Verdict(refusing[0][0], None if None in waits else max(wait or 0 for wait in waits))

    def _over(self, limit: Limit, counter: Counter, ask: Ask) -> tuple[bool, int | None]:
        if limit.metric == "concurrent":
            return self.live(counter) + 1 > limit.amount, None
        if limit.metric == "budget":
            period = period_at(limit.window, "UTC", _at(self.now))  # type: ignore[arg-type]
            spent, reserved = self.money(counter, period.start, period.end)
            return ask.bound > 0 and spent + reserved + ask.bound > limit.amount, None
        cost = ask.tokens if limit.metric == "tokens" else 1
        buckets = self.buckets(counter)
        used = sum(buckets.values())
        if used + cost <= limit.amount and limit.amount > 0:
            return False, 0
        if cost > limit.amount or limit.amount == 0:
            return True, None
        width = WIDTH_S[str(counter.window)]
        for bucket in sorted(buckets):
            used -= buckets[bucket]
            if used + cost <= limit.amount:
                return True, (bucket + 61) * width - self.now
        raise AssertionError("an empty window lets it pass")

    def remaining(self, ask: Ask, metric: str) -> int | None:
        """Of the tightest limit that may refuse."""
        left = [
            max(0, limit.amount - sum(self.buckets(counter).values()))
            for limit, counter in self.counters(ask)
            if limit.metric == metric and limit.hard
        ]
        return min(left, default=None)

    # What happens

    def admit(self, ask: Ask, ticket: Ticket) -> None:
        self.requests.append(Request(ask, ticket, self.now, self.now + LEASE_S))

    def settle(self, request: Request, status: Status, tokens: tuple[int, int], *, refund: bool) -> None:
        if request.by_gateway:
            return
        charged = 0 if status == "failed" and tokens[1] == 0 else price(*tokens)
        request.rows.append((status, charged, sum(tokens)))
        request.by_gateway, request.resumed, request.refunded = True, False, refund

    def expire(self) -> None:
        for request in self.requests:
            if request.expiry <= self.now and not request.lost:
                if request.open:
                    request.rows.append(("abandoned", price(*request.kept), sum(request.kept)))
                request.resumed = False

    def renew(self, running: set[object]) -> None:
        """``running``: ids of the requests that a gateway remembers."""
        for request in self.requests:
            if request.by_gateway or request.forgotten or request.ticket.request_id not in running:
                continue
            if request.open:
                request.kept = request.seen
            else:
                request.resumed = True
            request.expiry = self.now + LEASE_S

    def flush(self, running: set[object]) -> None:
        """Redis forgot everything; gateways brought back what they hold. What was settled is known from the ledger."""
        for request in self.requests:
            request.resumed, request.forgotten = False, request.forgotten or bool(request.rows)
            if request.open and request.ticket.request_id not in running:
                request.lost = True
            elif request.open:
                request.kept = request.seen
                request.expiry = self.now + LEASE_S


def _at(second: int) -> datetime:
    return EPOCH + timedelta(seconds=second)
