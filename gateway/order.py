"""From what a client asks to what is sent to a backend, within what its route and its key allow."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import msgspec

from gateway.admission.ticket import MAX_AMOUNT, Bound, Draft
from gateway.ask import Ask, Call
from gateway.backends.backend import Order
from gateway.billing.prices import Tariff
from gateway.routing.route import Route
from gateway.tenants.principal import Principal
from gateway.tokens.counter import PromptBound
from worker.protocol.errors import ApiError, bad_request, context_length_exceeded

DEFAULT_COMPLETION_TOKENS = 16


class Plan(msgspec.Struct, frozen=True):
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
    """What is asked of a backend, and the most tokens of output over all choices.

    ``context_length`` is the most that any backend takes, which may be more than the route means to offer.
    Raises ApiError (400) for a cap, or a prompt, that route or key does not allow.
    """
    output = _output_cap(ask, route, principal, prompt)
    # A server that is only to echo the prompt may draw a token nevertheless, and tell it: vLLM does.
    output_tokens = 0 if output is None else max(output, 1) * ask.choices
    order = Order(
        request_id=str(call.request_id),
        model=route.name,
        targets=route.targets,
        context_length=context_length,
        body=ask.body,
        streamed=ask.stream,
        include_usage=ask.include_usage,
        output_cap=output,
        clamp_output=output is not None and ask.max_output_tokens is None,
        salt=principal.salt,
        tenant=str(principal.tenant_id),
        weight=principal.weight,
        prompt_bytes=ask.size,
        prompt_tokens=prompt.tokens if prompt.counted_by is not None else None,
        output_tokens=output_tokens,
        prompts=len(ask.inputs) or 1,
        api=ask.api,
        chat=ask.chat,
        not_chat=ask.not_chat,
        from_chat=ask.from_chat,
    )
    return order, output_tokens


def make_bound(tariff: Tariff, prompt: PromptBound, output: int) -> Bound:
    """What is reserved. ``output``: tokens over all choices. Raises ApiError (400) beyond what can be counted."""
    nano_usd = tariff.bound(prompt.tokens, output, prompt.images)
    if nano_usd > MAX_AMOUNT:
        raise bad_request("So much output cannot be accounted for. Ask for less, or for fewer choices.", param="n")
    return Bound(nano_usd, prompt.tokens + output)


def _output_cap(ask: Ask, route: Route, principal: Principal, prompt: PromptBound) -> int | None:
    """Most tokens of output of one choice; None: there is none to be capped. Raises ApiError (400)."""
    if ask.api == "embeddings":
        most_context = principal.max_context_tokens
        if most_context is not None and prompt.longest > most_context:
            raise _context_of_key_exceeded(ask, most_context, prompt, 0)
        return None
    most, whose = route.max_output_tokens, "this model gives"
    if principal.max_output_tokens is not None and principal.max_output_tokens < most:
        most, whose = principal.max_output_tokens, "this API key may ask for"
    cap = ask.max_output_tokens
    if cap is not None and cap > most:
        field = ask.cap_field
        raise bad_request(f"'{field}' is {cap}, but {whose} at most {most} tokens of output.", param=field)
    if principal.max_context_tokens is None:
        return min(_default_output(ask, route), most) if cap is None else cap
    room = principal.max_context_tokens - prompt.longest
    if room < (cap or 1):
        raise _context_of_key_exceeded(ask, principal.max_context_tokens, prompt, room)
    return min(_default_output(ask, route), most, room) if cap is None else cap


def _default_output(ask: Ask, route: Route) -> int:
    """Completions without a cap end after 16 tokens, as OpenAI's reference has it."""
    return DEFAULT_COMPLETION_TOKENS if ask.api == "completions" else route.default_output_tokens


def _context_of_key_exceeded(ask: Ask, most: int, prompt: PromptBound, room: int) -> ApiError:
    size = f"{'' if prompt.counted_by is not None else 'up to '}{prompt.longest} tokens"
    whose = "the prompt" if len(ask.inputs) < 2 else "the longest prompt"
    message = f"This API key may use {most} tokens of prompt and output together, and {whose} has {size}."
    if room < 1 or ask.max_output_tokens is None:
        return context_length_exceeded(f"{message} Shorten the {ask.prompt_field}.", param=ask.prompt_field)
    field = ask.cap_field
    return context_length_exceeded(
        f"{message} Shorten the {ask.prompt_field}, or set '{field}' to at most {room}.", param=field
    )
