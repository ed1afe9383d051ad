"""The road of one request, from the tenant's key to the settled row. Read ``Pipeline.serve`` first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial

import structlog

from gateway.admission.errors import Refused, Stale
from gateway.admission.redis import RedisUnavailable
from gateway.admission.service import Admission
from gateway.admission.ticket import Bound, Draft, Ticket
from gateway.answer import Answer
from gateway.answerable import Answerable
from gateway.ask import Ask, Call
from gateway.backends import faults
from gateway.backends.relay import Relay
from gateway.billing.prices import PriceBook, Tariff
from gateway.billing.usage import TokenUsage
from gateway.cache.found import Hit, Miss
from gateway.cached_answer import CachedAnswer, SharedAnswer
from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable
from gateway.idempotency.answers import Request
from gateway.idempotency.scope import checked_key, find_scope
from gateway.idempotency.service import Idempotency
from gateway.memory import Memory
from gateway.observability.observer import Observability, Observer
from gateway.order import Plan, make_bound, make_order
from gateway.policies.answer_cache import CacheRules
from gateway.refusals import invalid_key, not_priced, out_of_scope, over_limit, unavailable
from gateway.routing.route import Route
from gateway.secret_key import SecretKey
from gateway.telemetry import Sampler
from gateway.tenants.catalog import Catalog
from gateway.tenants.end_users import end_user_hash
from gateway.tenants.principal import Principal
from gateway.tenants.records import InvalidKey
from gateway.tenants.service import Tenants
from gateway.tokens.counter import PromptBound, PromptCounter
from worker.protocol.errors import ApiError, model_not_found

_FREE = Tariff(None, None)
_OPEN_PATIENCE_S = 0.2
"""So long a tenant that fails open waits for its idempotency key: the admission has to wait for Redis once more."""
_log = structlog.get_logger("gateway.request")


class Pipeline:
    def __init__(
        self,
        *,
        tenants: Tenants,
        catalog: Catalog,
        prices: PriceBook,
        counter: PromptCounter,
        admission: Admission,
        relay: Relay,
        idempotency: Idempotency,
        secret_key: SecretKey,
        observability: Observability,
        memory: Memory,
        clock: Clock,
        keepalive_s: float,
    ) -> None:
        self._tenants = tenants
        self._catalog = catalog
        self._prices = prices
        self._counter = counter
        self._admission = admission
        self._relay = relay
        self._idempotency = idempotency
        self._secret_key = secret_key
        self._observability = observability
        self._memory = memory
        self._keepalive_s = keepalive_s
        self._refusals = Sampler(clock)

    async def serve(self, call: Call) -> Answerable:
        """Everything up to the backend. Raises ApiError; after it returns, the answer sees to the settlement.

        It must not be cancelled between admission and return, so the door watches for hang-ups only afterwards; all
        that it waits for is bounded by short time limits.
        """
        observer = self._observability.begin(str(call.request_id), call.path, call.traceparent)
        try:
            principal = await self.authenticate(call.key)
            ask = await call.read(principal)
            if call.idempotency_key is not None:
                return await self._run_once(call, ask, principal, checked_key(call.idempotency_key), observer)
            return await self._run(call, ask, principal, observer)
        except ApiError as error:
            observer.refused(error.status, error.body.code)
            raise
        except BaseException as fault:
            observer.refused(500, type(fault).__name__)
            raise

    async def _run(self, call: Call, ask: Ask, principal: Principal, observer: Observer) -> Answerable:
        plan = await self._plan(call, ask, principal)
        rules = self._memory.rules(call, principal, plan.route)
        try:
            ticket = await self._admit(call, principal, plan.draft, plan.bound)
        except Stale as stale:
            principal = await self._reload(call.key, stale)
            plan = await self._plan(call, ask, principal)
            rules = self._memory.rules(call, principal, plan.route)
            ticket = await self._admit(call, principal, plan.draft, plan.bound, after=stale)
        ticket.reprice(plan.tariff_at(ticket.admitted_at))
        try:
            found = await self._memory.look_up(ask, plan, rules)
            answer = partial(self._answer, call, ask, plan, ticket, observer, rules)
            if isinstance(found, Miss) and found.following:
                return SharedAnswer(
                    found,
                    answer,
                    streamed=ask.stream,
                    timeout_s=plan.route.timeout_s,
                    keepalive_s=self._keepalive_s,
                    headers=ticket.headers,
                )
            return answer(found)
        except BaseException as fault:
            stopping = isinstance(fault, asyncio.CancelledError)
            code = "gateway_stopping" if stopping else "internal_error"
            ticket.settle("failed", TokenUsage(), attempts=0, error_code=code)
            raise

    def _answer(
        self,
        call: Call,
        ask: Ask,
        plan: Plan,
        ticket: Ticket,
        observer: Observer,
        rules: CacheRules,
        found: Hit | Miss | None,
    ) -> Answer | CachedAnswer:
        """To an admitted request: what the cache ``found``, or what a backend will say."""
        recording = self._memory.recording(call, ask, plan, ticket, rules, found)
        if isinstance(found, Hit):
            return CachedAnswer(call, ask, plan, ticket, found, observer, recording, hit_price_bp=rules.hit_price_bp)
        exchange = self._relay.open(
            plan.order, total_s=plan.route.timeout_s, checkpoint=ticket.checkpoint, observer=observer
        )
        return Answer(
            call,
            plan,
            ticket,
            exchange,
            observer,
            keepalive_s=self._keepalive_s,
            on_usage=self._compare,
            recording=recording,
            cache=None if found is None else found.outcome,
        )

    async def _run_once(self, call: Call, ask: Ask, principal: Principal, key: str, observer: Observer) -> Answerable:
        """As ``_run``, unless a request with the same idempotency key came before: its answer is this one's, too."""
        route = await self._resolve(ask.model, principal)
        scope = await find_scope(self._secret_key, principal, call.path, key, ask.raw)
        request = Request(
            id=call.request_id,
            streamed=ask.stream,
            timeout_s=route.timeout_s,
            keepalive_s=self._keepalive_s,
            execute=partial(self._run, call, ask, principal, observer),
            observer=observer,
            admit_replay=partial(self._admit_replay, call, ask, principal),
            patience_s=_OPEN_PATIENCE_S if principal.redis_loss == "fail_open" else None,
            record=partial(self._memory.replay, call, ask),
        )
        try:
            return await self._idempotency.answer(scope, request)
        except RedisUnavailable as fault:
            if principal.redis_loss == "fail_open":
                return await self._run(call, ask, principal, observer)
            raise unavailable(fault.retry_after_s) from fault

    async def _admit_replay(self, call: Call, ask: Ask, principal: Principal) -> Ticket:
        """It counts to requests, and to those that run at once; no price bears on it."""
        draft = self._draft(call, ask, principal, await self._resolve(ask.model, principal), _FREE)
        try:
            return await self._admit(call, principal, draft, Bound(0, 0))
        except Stale as stale:
            principal = await self._reload(call.key, stale)
            await self._resolve(ask.model, principal)
            return await self._admit(call, principal, draft, Bound(0, 0), after=stale)

    async def authenticate(self, key: str | None) -> Principal:
        """Raises ApiError."""
        try:
            return _may_infer(await self._tenants.authenticate(key, or_old=True))
        except InvalidKey:
            raise invalid_key(key) from None
        except DatabaseUnavailable as fault:
            raise unavailable() from fault

    async def models(self, key: str | None) -> list[Route]:
        """What the key may call, by name. Raises ApiError."""
        principal = await self.authenticate(key)
        try:
            routes = await self._catalog.routes()
        except DatabaseUnavailable as fault:
            raise unavailable() from fault
        return [route for route in routes if _allowed(route.name, principal)]

    async def prompt(
        self, key: str | None, read: Callable[[Principal], Awaitable[Ask]]
    ) -> tuple[Ask, Route, PromptBound]:
        """What is known of a prompt that is not to be run: nothing is admitted, nothing charged. Raises ApiError."""
        principal = await self.authenticate(key)
        ask = await read(principal)
        route = await self._resolve(ask.model, principal)
        context_length = max(route.context_length, self._relay.balancer.context_length(route.targets, ask.api) or 0)
        tenant = principal.tenant_id.bytes
        return ask, route, await self._counter.bound(ask, route, context_length, tenant=tenant, exactly=True)

    async def _plan(self, call: Call, ask: Ask, principal: Principal) -> Plan:
        """All that can be known before the admission. Raises ApiError."""
        route = await self._resolve(ask.model, principal)
        tariff_at = await self._tariffs(route, principal)
        tariff = tariff_at(self._admission.now())
        if tariff.charge is None and route.unpriced == "refuse":
            raise not_priced(route.name)
        longest = self._relay.balancer.context_length(route.targets, ask.api)
        context_length = max(route.context_length, longest or 0)
        prompt = await self._prompt(ask, route, principal, context_length)
        order, output = make_order(call, ask, route, principal, prompt, context_length)
        bound = make_bound(tariff, prompt, output)
        if longest is None:
            raise faults.no_backend(route.name).error()
        draft = self._draft(call, ask, principal, route, tariff)
        return Plan(principal, route, prompt, order, draft, bound, tariff_at)

    def _draft(self, call: Call, ask: Ask, principal: Principal, route: Route, tariff: Tariff) -> Draft:
        return Draft(
            route.name,
            tariff,
            streamed=ask.stream,
            client_request_id=call.client_request_id,
            end_user=self._end_user(ask, principal),
            tags=ask.tags,
            api=ask.api,
        )

    async def _resolve(self, model: str, principal: Principal) -> Route:
        try:
            route = await self._catalog.route(model)
        except DatabaseUnavailable as fault:
            raise unavailable() from fault
        if route is None or not _allowed(model, principal):
            raise model_not_found(model)
        return route

    async def _tariffs(self, route: Route, principal: Principal) -> Callable[[datetime], Tariff]:
        try:
            return await self._prices.tariffs(route.name, principal)
        except DatabaseUnavailable as fault:
            raise unavailable() from fault

    async def _prompt(self, ask: Ask, route: Route, principal: Principal, context_length: int) -> PromptBound:
        """Counted if something depends on it; without a limit on money or tokens any bound will do."""
        exactly = principal.max_context_tokens is not None or any(
            limit.metric in ("tokens", "budget") for limit in principal.tenant_limits
        )
        tenant = principal.tenant_id.bytes
        return await self._counter.bound(ask, route, context_length, tenant=tenant, exactly=exactly)

    def _end_user(self, ask: Ask, principal: Principal) -> str | None:
        return None if ask.end_user is None else end_user_hash(self._secret_key, principal.tenant_id, ask.end_user)

    async def _reload(self, key: str | None, stale: Stale) -> Principal:
        try:
            return _may_infer(await self._tenants.reload(key, at_least=stale.generation))
        except InvalidKey:
            raise invalid_key(key) from None
        except DatabaseUnavailable as fault:
            raise unavailable() from fault

    async def _admit(
        self, call: Call, principal: Principal, draft: Draft, bound: Bound, *, after: Stale | None = None
    ) -> Ticket:
        """Raises ApiError; Stale, unless it comes ``after`` another."""
        try:
            return await self._admission.admit(call.request_id, principal, draft=draft, bound=bound, after=after)
        except Refused as refused:
            self._log_refusal(call, principal, draft, refused)
            raise over_limit(refused, bound) from None
        except RedisUnavailable as fault:
            raise unavailable(fault.retry_after_s) from fault
        except DatabaseUnavailable as fault:  # Redis lacks a counter, and the ledger it is built from is away
            raise unavailable() from fault
        except Stale as fault:
            if after is None:
                raise
            raise unavailable() from fault

    def _log_refusal(self, call: Call, principal: Principal, draft: Draft, refused: Refused) -> None:
        stands_for = self._refusals.take(str(principal.tenant_id), refused.reason)
        if stands_for is not None:
            _log.info(
                "request_refused",
                request_id=str(call.request_id),
                tenant=principal.tenant_name,
                key_id=principal.key_id,
                route=draft.route,
                reason=refused.reason,
                subject=refused.subject,
                window=refused.window,
                times=stands_for,
            )

    def _compare(self, plan: Plan, usage: TokenUsage) -> None:
        """A prompt that has more tokens than were counted is a fault of the counting; one that has more than its
        backend was declared to take, of the declaration."""
        if usage.source != "backend":
            return
        self._counter.told(plan.prompt, plan.route, usage.prompt_tokens)
        declared = plan.order.context_length
        if usage.prompt_tokens > declared * plan.order.prompts:
            _log.error("context_length_too_low", route=plan.route.name, told=usage.prompt_tokens, declared=declared)


def _allowed(model: str, principal: Principal) -> bool:
    return principal.allowed_models is None or model in principal.allowed_models


def _may_infer(principal: Principal) -> Principal:
    if "inference" not in principal.scopes:
        raise out_of_scope()
    return principal
