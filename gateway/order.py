"""From what a client asks to what is sent to a backend, within what its route and its key allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import msgspec

from gateway.admission.ticket import MAX_AMOUNT, Bound, Draft
from gateway.ask import Ask, Body, Call, given
from gateway.backends.backend import Order
from gateway.billing.prices import Tariff
from gateway.routing.route import Route
from gateway.tenants.principal import Principal
from gateway.tokens.counter import PromptBound
from worker.protocol.errors import ApiError, bad_request, context_length_exceeded


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is decided of a request before it is admitted, for one state of its tenant's configuration."""

    principal: Principal
    route: Route
    prompt: PromptBound
    order: Order
    draft: Draft
    bound: Bound
    tariff_at: Callable[[datetime], Tariff]
    """The prices in force at a moment; ``draft`` and ``bound`` go by those of the planning."""


def make_order(
    call: Call, ask: Ask, route: Route, principal: Principal, prompt: PromptBound, context_length: int
) -> tuple[Order, int]:
    """What is sent to the backend, and the most tokens of output over all choices: the cap is written into the body.

    ``context_length`` is the most that any backend takes, which may be more than the route means to offer.
    Raises ApiError (400) for a cap, or a prompt, that route or key does not allow.
    """
    cap = ask.max_output_tokens
    output = _output_cap(ask, route, principal, prompt)
    body = ask.body | {"model": _json(route.backend_model)}
    if given(body, "max_completion_tokens"):
        body.pop("max_tokens", None)
    elif cap is None:
        body["max_tokens"] = _json(output)
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
        weight=principal.weight,
        prompt_bytes=ask.size,
        prompt_tokens=prompt.tokens if prompt.counted_by is not None else None,
        output_tokens=output * ask.choices,
    )
    return order, output * ask.choices


def make_bound(tariff: Tariff, prompt: PromptBound, output: int) -> Bound:
    """What is reserved. ``output``: tokens over all choices. Raises ApiError (400) beyond what can be counted."""
    nano_usd = tariff.bound(prompt.tokens, output, prompt.images)
    if nano_usd > MAX_AMOUNT:
        raise bad_request("So much output cannot be accounted for. Ask for less, or for fewer choices.", param="n")
    return Bound(nano_usd, prompt.tokens + output)


def _output_cap(ask: Ask, route: Route, principal: Principal, prompt: PromptBound) -> int:
    """Most tokens of output of one choice. Raises ApiError (400)."""
    most, whose = route.max_output_tokens, "this model gives"
    if principal.max_output_tokens is not None and principal.max_output_tokens < most:
        most, whose = principal.max_output_tokens, "this API key may ask for"
    cap = ask.max_output_tokens
    if cap is not None and cap > most:
        field = _cap_field(ask.body)
        raise bad_request(f"'{field}' is {cap}, but {whose} at most {most} tokens of output.", param=field)
    if principal.max_context_tokens is None:
        return min(route.default_output_tokens, most) if cap is None else cap
    room = principal.max_context_tokens - prompt.tokens
    if room < (cap or 1):
        raise _context_of_key_exceeded(ask, principal.max_context_tokens, prompt, room)
    return min(route.default_output_tokens, most, room) if cap is None else cap


def _context_of_key_exceeded(ask: Ask, most: int, prompt: PromptBound, room: int) -> ApiError:
    size = f"{'' if prompt.counted_by is not None else 'up to '}{prompt.tokens} tokens"
    message = f"This API key may use {most} tokens of prompt and output together, and the prompt has {size}."
    if room < 1 or ask.max_output_tokens is None:
        return context_length_exceeded(f"{message} Shorten the messages.")
    field = _cap_field(ask.body)
    return context_length_exceeded(f"{message} Shorten the messages, or set '{field}' to at most {room}.", param=field)


def _cap_field(body: Body) -> str:
    return "max_completion_tokens" if given(body, "max_completion_tokens") else "max_tokens"


def _json(value: str | int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
