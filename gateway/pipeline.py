"""The road of one request, from the tenant's key to the settled row. Read ``Pipeline.serve`` first.

Two stages of the plan are not here yet. The answer cache belongs between admission and the relay: a hit is an
``Answer`` that settles without an exchange. The prompt log belongs behind ``Answer._settle``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from uuid import UUID

import msgspec
import structlog

from gateway.admission.errors import Refused, Stale
from gateway.admission.redis import RedisUnavailable
from gateway.admission.service import Admission
from gateway.admission.ticket import MAX_AMOUNT, Bound, Draft, Ticket
from gateway.backends import faults
from gateway.backends.backend import Order
from gateway.backends.faults import BackendFault
from gateway.backends.relay import Exchange, Relay
from gateway.billing.usage import Price, Status, TokenUsage, usd_text
from gateway.clock import Clock
from gateway.db.engine import DatabaseUnavailable
from gateway.routing.route import Route
from gateway.telemetry import Sampler
from gateway.tenants.catalog import Catalog
from gateway.tenants.principal import Principal
from gateway.tenants.records import InvalidKey
from gateway.tenants.service import Tenants
from worker.protocol.errors import ApiError, bad_request, model_not_found, server_error, unauthorized

TEMPLATE_TOKENS = 256
TEMPLATE_TOKENS_PER_MESSAGE = 32
"""What a chat template may add to the text of a request, in the bound of its cost."""

Body = dict[str, msgspec.Raw]
"""The fields of a request, each still the JSON it came as."""

_NULL = msgspec.Raw(b"null")
_messages_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_log = structlog.get_logger("gateway.request")


@dataclass(frozen=True, slots=True)
class Ask:
    """What the gateway must know of a chat completion request, and the request itself."""

    body: Body
    model: str
    size: int
    """Bytes of the body as it came."""
    stream: bool
    include_usage: bool
    choices: int
    max_output_tokens: int | None


@dataclass(frozen=True, slots=True)
class Call:
    """A request at the door: who asks is known before its body is read."""

    request_id: UUID
    key: str | None
    client_request_id: str | None
    read: Callable[[], Awaitable[Ask]]


class Pipeline:
    def __init__(
        self,
        *,
        tenants: Tenants,
        catalog: Catalog,
        admission: Admission,
        relay: Relay,
        clock: Clock,
        keepalive_s: float,
    ) -> None:
        self._tenants = tenants
        self._catalog = catalog
        self._admission = admission
        self._relay = relay
        self._keepalive_s = keepalive_s
        self._refusals = Sampler(clock)

    async def serve(self, call: Call) -> Answer:
        """Everything up to the backend. Raises ApiError; after it returns, the Answer sees to the settlement.

        It must not be cancelled between admission and return, so the door watches for hang-ups only afterwards; all
        that it waits for is bounded by short time limits.
        """
        principal = await self.authenticate(call.key)
        ask = await call.read()
        route = await self._resolve(ask.model, principal)
        price = await self._price(route)
        longest = self._relay.balancer.context_length(route.pool)
        order, bound = _order(call, ask, route, principal, price, max(route.context_length, longest or 0))
        if longest is None:
            raise faults.no_backend(route.name).error()
        ticket = await self._admit(call, ask, route, principal, price, bound)
        exchange = self._relay.open(order, total_s=route.timeout_s, checkpoint=ticket.checkpoint)
        return Answer(call, principal, route, ticket, exchange, keepalive_s=self._keepalive_s)

    async def authenticate(self, key: str | None) -> Principal:
        """Raises ApiError."""
        try:
            return _may_infer(await self._tenants.authenticate(key))
        except InvalidKey:
            raise _invalid_key(key) from None
        except DatabaseUnavailable as fault:
            raise _unavailable() from fault

    async def models(self, key: str | None) -> list[Route]:
        """What the key may call, by name. Raises ApiError."""
        principal = await self.authenticate(key)
        try:
            routes = await self._catalog.routes()
        except DatabaseUnavailable as fault:
            raise _unavailable() from fault
        return [route for route in routes if _allowed(route.name, principal)]

    async def _resolve(self, model: str, principal: Principal) -> Route:
        try:
            route = await self._catalog.route(model)
        except DatabaseUnavailable as fault:
            raise _unavailable() from fault
        if route is None or not _allowed(model, principal):
            raise model_not_found(model)
        return route

    async def _price(self, route: Route) -> Price | None:
        try:
            price = await self._catalog.price(route.name, self._admission.now())
        except DatabaseUnavailable as fault:
            raise _unavailable() from fault
        if price is None and route.unpriced == "refuse":
            raise server_error(
                f"The model {route.name!r} has no price, so it is not served. Ask the operator to set one.",
                status=503,
                code="model_not_priced",
            )
        return price

    async def _admit(
        self, call: Call, ask: Ask, route: Route, principal: Principal, price: Price | None, bound: Bound
    ) -> Ticket:
        draft = Draft(route.name, price, streamed=ask.stream, client_request_id=call.client_request_id)
        try:
            try:
                return await self._admission.admit(call.request_id, principal, draft=draft, bound=bound)
            except Stale as stale:
                current = await self._tenants.reload(call.key, at_least=stale.generation)
                current = _may_infer(current)
                if not _allowed(route.name, current):
                    raise model_not_found(route.name) from None
                return await self._admission.admit(call.request_id, current, draft=draft, bound=bound, after=stale)
        except InvalidKey:
            raise _invalid_key(call.key) from None
        except Refused as refused:
            stands_for = self._refusals.take(str(principal.tenant_id), refused.reason)
            if stands_for is not None:
                _log.info(
                    "request_refused",
                    request_id=str(call.request_id),
                    tenant=principal.tenant_name,
                    key_id=principal.key_id,
                    route=route.name,
                    reason=refused.reason,
                    times=stands_for,
                )
            raise _over_limit(refused) from None
        except (DatabaseUnavailable, Stale) as fault:
            raise _unavailable() from fault
        except RedisUnavailable as fault:
            raise _unavailable(fault.retry_after_s) from fault


class Answer:
    """An admitted request, about to be answered. An async context manager that settles it exactly once.

    Read it by ``events`` (streamed) or ``whole``. If the block ends before the answer is complete, the backend's
    connection is closed at once; ``left`` says beforehand that the client hung up, which makes the row ``aborted``.
    """

    def __init__(
        self, call: Call, principal: Principal, route: Route, ticket: Ticket, exchange: Exchange, *, keepalive_s: float
    ) -> None:
        self._call = call
        self._principal = principal
        self._route = route
        self._ticket = ticket
        self._exchange = exchange
        self._keepalive_s = keepalive_s
        self._settled = False
        self.client_left = False

    @property
    def streamed(self) -> bool:
        return self._ticket.draft.streamed

    @property
    def timeout_s(self) -> float:
        """The route's limit for the whole answer."""
        return self._route.timeout_s

    @property
    def complete(self) -> bool:
        return self._exchange.complete

    def left(self) -> None:
        """The client hung up."""
        self.client_left = True

    def headers(self) -> list[tuple[str, str]]:
        """What the answer's head tells of it. Only a whole answer's cost is known before its head leaves."""
        headers = list(self._ticket.headers.items())
        if self._exchange.backend_id is not None:
            headers.append(("x-penstock-backend", self._exchange.backend_id))
        if self._settled and not self.streamed:
            headers.append(("x-penstock-cost-usd", usd_text(self._ticket.charged_nano_usd)))
        return headers

    async def events(self) -> list[bytes]:
        """JSON of the events that came; none when it is time for a sign of life, or when the answer is ``complete``.

        Raises ApiError. Once it returned, the backend had begun a good answer.
        """
        return await self._advance(self._keepalive_s)

    async def whole(self) -> bytes:
        """The JSON body. Raises ApiError."""
        events: list[bytes] = []
        while not self.complete:
            events += await self._advance(None)
        await self._ticket.settled()
        return events[-1]

    async def _advance(self, wait_s: float | None) -> list[bytes]:
        try:
            found = await self._exchange.events(wait_s=wait_s)
        except BackendFault as fault:
            self._settle("failed", fault.code)
            raise fault.error() from fault
        if self.complete:
            self._settle("ok")
        return found

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.client_left:
            self._settle("aborted")
        elif kind is not None and issubclass(kind, asyncio.CancelledError):
            self._settle("failed", "gateway_stopping")
        else:
            self._settle("failed", "internal_error")
        await self._exchange.__aexit__(kind, fault, trace)

    def _settle(self, status: Status, error_code: str | None = None) -> None:
        if self._settled:
            return
        self._settled = True
        exchange = self._exchange
        usage = exchange.usage
        if status == "failed" and not (self.streamed and exchange.handed_on):
            # Nothing of it reached the client: tokens that were generated are not the tenant's to pay.
            usage = TokenUsage(usage.prompt_tokens, 0, usage.cached_tokens, usage.source)
        self._ticket.settle(
            status,
            usage,
            backend=exchange.backend_id,
            attempts=exchange.attempts,
            error_code=error_code,
            first_token_ms=exchange.first_token_ms,
        )
        _log.info(
            "request",
            request_id=str(self._call.request_id),
            client_request_id=self._call.client_request_id,
            tenant=self._principal.tenant_name,
            key_id=self._principal.key_id,
            route=self._route.name,
            status=status,
            error_code=error_code,
            streamed=self.streamed,
            backend=exchange.backend_id,
            attempts=exchange.attempts,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            charged_nano_usd=self._ticket.charged_nano_usd,
            first_token_ms=exchange.first_token_ms,
            total_ms=exchange.elapsed_ms(),
        )


def _order(
    call: Call, ask: Ask, route: Route, principal: Principal, price: Price | None, context_length: int
) -> tuple[Order, Bound]:
    """What is sent to the backend, and the most it can come to: the output cap is written into the body.

    ``context_length`` is the most that any backend takes, which may be more than the route means to offer.
    Raises ApiError for a cap that the route does not allow.
    """
    cap = ask.max_output_tokens
    if cap is not None and cap > route.max_output_tokens:
        field = "max_completion_tokens" if _given(ask.body, "max_completion_tokens") else "max_tokens"
        raise bad_request(
            f"'{field}' is {cap}, but this model gives at most {route.max_output_tokens} tokens of output.", param=field
        )
    prompt = _prompt_bound(ask, context_length)
    body = ask.body
    body["model"] = _json(route.backend_model)
    if _given(body, "max_completion_tokens"):
        body.pop("max_tokens", None)
    elif cap is None:
        body["max_tokens"] = _json(route.default_output_tokens)
    output = (route.default_output_tokens if cap is None else cap) * ask.choices
    order = Order(
        request_id=str(call.request_id),
        pool=route.pool,
        model=route.name,
        backend_model=route.backend_model,
        context_length=context_length,
        body=msgspec.json.encode(body),
        streamed=ask.stream,
        include_usage=ask.include_usage,
        clamp_output=cap is None,
        salt=principal.salt,
        tenant=str(principal.tenant_id),
        prompt_bytes=ask.size,
    )
    bound = price.bound(prompt, output) if price is not None else 0
    if bound > MAX_AMOUNT:
        raise bad_request("So much output cannot be accounted for. Ask for less, or for fewer choices.", param="n")
    return order, Bound(bound, prompt + output)


def _prompt_bound(ask: Ask, context_length: int) -> int:
    """Most tokens of the prompt: no tokenizer that works on bytes makes more tokens of a text than it has bytes.

    Messages are looked at one by one only if their number matters. Raises ApiError.
    """
    if ask.size >= context_length:
        return context_length
    messages = _messages_decoder.decode(ask.body["messages"])
    for index, message in enumerate(messages):
        if not bytes(message).startswith(b"{"):
            raise bad_request(
                f"'messages[{index}]' must be an object with 'role' and 'content'.", param=f"messages[{index}]"
            )
    return min(ask.size + TEMPLATE_TOKENS + TEMPLATE_TOKENS_PER_MESSAGE * len(messages), context_length)


def _given(body: Body, field: str) -> bool:
    return body.get(field, _NULL) != _NULL


def _json(value: str | int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _allowed(model: str, principal: Principal) -> bool:
    return principal.allowed_models is None or model in principal.allowed_models


def _may_infer(principal: Principal) -> Principal:
    if "inference" not in principal.scopes:
        raise ApiError(
            403,
            "This API key may not run models. Use a key with the scope 'inference'.",
            type="permission_error",
            code="insufficient_scope",
        )
    return principal


def _invalid_key(key: str | None) -> ApiError:
    if not key:
        return unauthorized("No API key. Send it as 'authorization: Bearer <key>'.")
    return unauthorized("The API key is not valid. Check it, or ask your administrator for another.")


def _unavailable(retry_after_s: float = 1.0) -> ApiError:
    return ApiError(
        503,
        "The gateway cannot reach its own services at the moment. Try again shortly.",
        type="server_error",
        code="service_unavailable",
        headers={"retry-after": str(max(1, math.ceil(retry_after_s)))},
    )


def _over_limit(refused: Refused) -> ApiError:
    headers = dict(refused.headers)
    if refused.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(refused.retry_after_s)))
    if refused.reason == "budget":
        return ApiError(
            429,
            "The budget does not allow this request. Ask for less output, wait for the next period, or have the "
            "budget raised.",
            type="insufficient_quota",
            code="insufficient_quota",
            headers=headers,
        )
    if refused.reason == "concurrent":
        message = f"Over the limit of {refused.limit} requests at a time. Wait until one of them has ended."
    else:
        message = (
            f"Over the limit of {refused.limit} {refused.reason} per {refused.window}. Wait as 'retry-after' says."
        )
    return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
