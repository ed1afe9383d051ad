"""What is sent on within what route and key allow, and the bound that is reserved for it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.ticket import Bound
from gateway.ask import Ask, Call
from gateway.backends.backend import Order
from gateway.backends.fleet_worker import FleetWorker
from gateway.billing.prices import Price, Tariff
from gateway.billing.usage import TokenUsage
from gateway.http.openai.ask import parse_chat
from gateway.order import make_bound, make_order
from gateway.routing.route import Endpoint, Route, Target
from gateway.tenants.principal import Principal
from gateway.tokens.counter import PromptBound
from worker.protocol.errors import ApiError

ROUTE = Route("public", "pool", "internal", 8192, 512, 4096, 30.0)
PRICE = Price(uuid4(), "public", Decimal("0.1"), Decimal("0.4"), datetime(2026, 1, 1, tzinfo=UTC))
TARIFF = Tariff(PRICE, PRICE)
PRINCIPAL = Principal(
    **dict.fromkeys(Principal.__dataclass_fields__)  # type: ignore[arg-type]
    | {"tenant_id": uuid4(), "tenant_name": "acme", "key_id": "k", "salt": "salt-of-acme", "weight": 1.0}
)
PROMPT = PromptBound(100, counted_by="o200k_base")


async def never(_principal: Principal) -> Ask:
    raise AssertionError


class Sent:
    """What our worker is sent for an order, and the order's own fields."""

    def __init__(self, order: Order) -> None:
        endpoint = Endpoint("w", "pool", "http://w", "m", 8192)
        self.body = FleetWorker(None).outgoing(order, endpoint, order.targets[0].backend_model).body
        self.order = order

    def __getattr__(self, name: str) -> Any:
        return getattr(self.order, name)


def order(
    *,
    route: Route = ROUTE,
    tariff: Tariff = TARIFF,
    caller: Principal = PRINCIPAL,
    prompt: PromptBound = PROMPT,
    choices: int = 1,
    longest: int = ROUTE.context_length,
    **fields: Any,
) -> tuple[Any, Bound]:
    body = {"model": "public", "messages": [{"role": "user", "content": "hi"}]} | fields
    raw = json.dumps(body).encode()
    cap = body.get("max_completion_tokens") or body.get("max_tokens")
    ask = msgspec.structs.replace(parse_chat(raw), choices=choices, max_output_tokens=cap)
    call = Call(uuid4(), None, None, never)
    plain, output = make_order(call, ask, route, caller, prompt, longest)
    # A second order of the same request, for a newer state of its tenant, begins from the body as it came.
    assert make_order(call, ask, route, caller, prompt, longest)[0] == plain
    return Sent(plain), make_bound(tariff, prompt, output)


def test_the_body_bears_the_workers_model_and_the_routes_default_cap() -> None:
    caller = replace(PRINCIPAL, weight=2.5)
    made, bound = order(caller=caller, temperature=0, unknown=[1])
    sent = json.loads(made.body)
    assert sent["model"] == "internal"
    assert sent["max_tokens"] == 512
    assert (sent["temperature"], sent["unknown"]) == (0, [1])
    assert made.clamp_output
    assert (made.model, made.targets, made.salt) == ("public", (Target("pool", "internal"),), caller.salt)
    assert (made.tenant, made.weight) == (str(caller.tenant_id), 2.5)
    assert (made.prompt_tokens, made.output_tokens) == (100, 512)
    assert bound == Bound(PRICE.bound(100, 512), 612)
    assert order(prompt=PromptBound(300))[0].prompt_tokens is None


@pytest.mark.parametrize(
    ("fields", "sent_cap"),
    [
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({"max_completion_tokens": 9}, {"max_completion_tokens": 9}),
        ({"max_completion_tokens": 9, "max_tokens": 4000}, {"max_completion_tokens": 9}),
        ({"max_completion_tokens": None, "max_tokens": 9}, {"max_completion_tokens": None, "max_tokens": 9}),
    ],
)
def test_a_cap_of_the_client_is_sent_as_it_was_written(fields: dict[str, Any], sent_cap: dict[str, Any]) -> None:
    made, bound = order(**fields)
    sent = json.loads(made.body)
    assert {name: sent[name] for name in sent if name.startswith("max_")} == sent_cap
    assert not made.clamp_output
    assert bound == Bound(PRICE.bound(100, 9), 109)


def test_the_bound_counts_every_choice() -> None:
    one, three = order(choices=1, max_tokens=10)[1], order(choices=3, max_tokens=10)[1]
    assert three.nano_usd - one.nano_usd == PRICE.bound(0, 20)
    assert three.tokens == 100 + 30


def test_images_are_in_the_bound() -> None:
    pictures = replace(PRICE, usd_per_image=Decimal("0.01"))
    tariff = Tariff(pictures, pictures)
    bound = order(tariff=tariff, prompt=msgspec.structs.replace(PROMPT, images=3))[1]
    assert bound.nano_usd - order(tariff=tariff)[1].nano_usd == 30_000_000


def test_a_cap_above_the_routes_is_refused_by_its_own_name() -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(ApiError) as caught:
            order(**{field: 4097})
        assert caught.value.status == 400
        assert caught.value.body.param == field


def test_a_keys_output_cap_lowers_the_routes_maximum_and_default() -> None:
    caller = replace(PRINCIPAL, max_output_tokens=200)
    made, bound = order(caller=caller)
    assert json.loads(made.body)["max_tokens"] == 200
    assert bound.tokens == 300
    assert order(caller=caller, max_tokens=200)[1].tokens == 300
    with pytest.raises(ApiError, match="this API key may ask for at most 200") as caught:
        order(caller=caller, max_tokens=201)
    assert caught.value.body.param == "max_tokens"
    assert order(caller=replace(PRINCIPAL, max_output_tokens=100_000))[1].tokens == 612


def test_a_keys_context_cap_holds_prompt_and_output_of_each_choice() -> None:
    caller = replace(PRINCIPAL, max_context_tokens=150)
    made, bound = order(caller=caller, choices=4)
    assert json.loads(made.body)["max_tokens"] == 50
    assert bound.tokens == 100 + 4 * 50
    assert order(caller=caller, max_completion_tokens=50)[1].tokens == 150
    with pytest.raises(ApiError, match="at most 50") as caught:
        order(caller=caller, max_completion_tokens=51)
    assert (caught.value.body.param, caught.value.body.code) == ("max_completion_tokens", "context_length_exceeded")
    for used in (150, 200):
        with pytest.raises(ApiError, match="Shorten the messages") as caught:
            order(caller=caller, prompt=PromptBound(used))
        assert (caught.value.status, caught.value.body.param) == (400, "messages")
        assert f"up to {used} tokens" in caught.value.body.message


def test_an_unpriced_request_is_bound_by_no_money_and_an_absurd_one_is_refused() -> None:
    assert order(tariff=Tariff(None, None))[1] == Bound(0, 612)
    dear = replace(PRICE, output_usd_per_mtok=Decimal(10_000))
    with pytest.raises(ApiError):
        order(
            tariff=Tariff(dear, dear),
            route=replace(ROUTE, max_output_tokens=100_000_000),
            max_tokens=100_000_000,
            choices=128,
        )


@given(st.integers(0, 8192), st.integers(1, 4096), st.integers(1, 5), st.integers(1, 4096), st.integers(1, 9000))
def test_no_request_can_come_to_more_than_its_bound(
    prompt: int, cap: int, choices: int, most_output: int, most_context: int
) -> None:
    caller = replace(PRINCIPAL, max_output_tokens=most_output, max_context_tokens=most_context)
    try:
        made, bound = order(caller=caller, prompt=PromptBound(prompt), max_tokens=cap, choices=choices)
    except ApiError:
        assert cap > most_output or prompt + cap > most_context
        return
    sent = json.loads(made.body)["max_tokens"]
    assert sent <= most_output
    assert prompt + sent <= most_context
    worst = TokenUsage(prompt, sent * choices)
    assert TARIFF.charged(worst) <= bound.nano_usd
    assert worst.prompt_tokens + worst.completion_tokens == bound.tokens
