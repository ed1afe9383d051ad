"""What is sent on, and the bound that is reserved for it."""

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

from gateway.billing.usage import Price, TokenUsage
from gateway.pipeline import Ask, Body, Call, _order
from gateway.routing.route import Route
from gateway.tenants.principal import Limits, Principal
from worker.protocol.errors import ApiError

ROUTE = Route("public", "pool", "internal", 8192, 512, 4096, 30.0)
PRICE = Price(uuid4(), "public", Decimal("0.1"), Decimal("0.4"), datetime(2026, 1, 1, tzinfo=UTC))
PRINCIPAL = Principal(uuid4(), "acme", "k", frozenset({"inference"}), Limits(), 1, "salt-of-acme")


async def never() -> Ask:
    raise AssertionError


def order(
    *,
    route: Route = ROUTE,
    price: Price | None = PRICE,
    choices: int = 1,
    longest: int = ROUTE.context_length,
    **fields: Any,
) -> tuple[Any, int]:
    body = {"model": "public", "messages": [{"role": "user", "content": "hi"}]} | fields
    raw = json.dumps(body).encode()
    cap = body.get("max_completion_tokens") or body.get("max_tokens")
    fields_as_sent = msgspec.json.decode(raw, type=Body)
    ask = Ask(fields_as_sent, "public", len(raw), False, False, choices, cap)
    made, bound = _order(Call(uuid4(), None, None, never), ask, route, PRINCIPAL, price, longest)
    return made, bound.nano_usd


def test_the_body_bears_the_workers_model_and_the_routes_default_cap() -> None:
    made, bound = order(temperature=0, unknown=[1])
    sent = json.loads(made.body)
    assert sent["model"] == "internal"
    assert sent["max_tokens"] == 512
    assert (sent["temperature"], sent["unknown"]) == (0, [1])
    assert made.clamp_output
    assert (made.model, made.backend_model, made.salt) == ("public", "internal", "salt-of-acme")
    assert (made.tenant, made.weight) == (str(PRINCIPAL.tenant_id), 1)
    assert bound == PRICE.bound(made.prompt_bytes + 256 + 32, 512)


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
    assert bound == PRICE.bound(made.prompt_bytes + 256 + 32, 9)


def test_the_bound_counts_every_choice_and_no_more_prompt_than_fits() -> None:
    assert order(choices=3, max_tokens=10)[1] - order(choices=1, max_tokens=10)[1] == PRICE.bound(0, 20)
    long = "x" * 100_000
    assert order(max_tokens=1, longest=50_000, messages=[{"content": long}])[1] == PRICE.bound(50_000, 1)
    assert order(max_tokens=1, messages=[{"content": long}])[1] == PRICE.bound(ROUTE.context_length, 1)


def test_messages_are_counted_only_where_their_number_matters() -> None:
    with pytest.raises(ApiError) as caught:
        order(messages=[{}, "hi"])
    assert (caught.value.status, caught.value.body.param) == (400, "messages[1]")
    # A body as long as the context is bound by the context, and its messages are the worker's to read.
    assert order(messages=[{}, "x" * ROUTE.context_length])[1] == PRICE.bound(ROUTE.context_length, 512)
    assert order(messages=[{}] * 10)[1] - order(messages=[{}] * 9)[1] == PRICE.bound(len(", {}") + 32, 0)


def test_a_cap_above_the_routes_is_refused_by_its_own_name() -> None:
    for field in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(ApiError) as caught:
            order(**{field: 4097})
        assert caught.value.status == 400
        assert caught.value.body.param == field


def test_an_unpriced_request_is_bound_by_nothing_and_an_absurd_one_is_refused() -> None:
    assert order(price=None)[1] == 0
    dear = replace(PRICE, output_usd_per_mtok=Decimal(10_000))
    with pytest.raises(ApiError):
        order(
            price=dear,
            route=replace(ROUTE, max_output_tokens=100_000_000),
            max_tokens=100_000_000,
            choices=128,
        )


@given(st.text(max_size=60), st.integers(1, 4096), st.integers(1, 5))
def test_no_text_can_cost_more_than_its_bound(content: str, cap: int, choices: int) -> None:
    """A tokenizer that works on bytes makes at most a token of each."""
    _, bound = order(max_tokens=cap, choices=choices, messages=[{"role": "user", "content": content}])
    worst = TokenUsage(len(content.encode(errors="replace")) + 32, cap * choices)
    assert PRICE.amount(worst) <= bound
