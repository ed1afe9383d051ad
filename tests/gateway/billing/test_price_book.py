from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.genai_import import hosted_price
from gateway.billing.price_spec import RATES, checked, parse_rate
from gateway.billing.prices import PriceBook, UnknownPrice
from gateway.billing.usage import TokenUsage
from gateway.db.engine import transaction
from gateway.db.tables import tenants
from gateway.routing.route import Route
from gateway.tenants.audit import Actor
from gateway.tenants.catalog import Catalog, UnknownRoute
from gateway.tenants.principal import Principal
from gateway.tenants.records import AlreadyExists, ConfigurationError, StateConflict, UnknownTenant
from tests.gateway.billing.support import fetch
from tests.gateway.conftest import price_spec
from tests.gateway.db.support import ManualClock

ACTOR = Actor("admin-1")
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
TICK = timedelta(microseconds=1)
ACME, OTHER = UUID(int=11), UUID(int=12)


def principal(tenant_id: UUID = ACME, markup_bp: int = 0) -> Principal:
    values: dict[str, Any] = dict.fromkeys(Principal.__dataclass_fields__)
    values |= {"tenant_id": tenant_id, "tenant_name": "acme", "key_id": "k", "markup_bp": markup_bp}
    return Principal(**values)


@pytest.fixture
async def book(engine: AsyncEngine, clock: ManualClock) -> PriceBook:
    catalog = Catalog(engine, clock)
    await catalog.create_pool(ACTOR, "pool")
    await catalog.create_route(ACTOR, Route("m", "pool", "m", 8192, 512, 4096, 300.0))
    async with transaction(engine) as connection:
        rows = [{"id": ACME, "name": "acme", "salt": "a"}, {"id": OTHER, "name": "other", "salt": "b"}]
        await connection.execute(insert(tenants), rows)
    return PriceBook(engine, clock)


async def test_the_price_in_force_is_the_latest_that_has_begun(book: PriceBook) -> None:
    later = BEGIN + timedelta(days=10)
    assert await book.price("m", BEGIN) is None
    second = await book.set_price(ACTOR, price_spec("m", "3", "4", effective_from=later))
    first = await book.set_price(ACTOR, price_spec("m", "0.10", "0.40", effective_from=BEGIN))
    assert await book.price("m", BEGIN - TICK) is None
    assert await book.price("m", BEGIN) == first
    assert await book.price("m", later - TICK) == first
    assert await book.price("m", later) == second
    assert await book.price("m", later + timedelta(days=1000)) == second
    assert await book.price("n", later) is None
    assert await book.prices("m") == [first, second]


async def test_a_tenants_own_price_goes_before_the_list_and_bears_no_markup(book: PriceBook) -> None:
    own = await book.set_price(ACTOR, price_spec("m", "5", "6", tenant="acme", effective_from=BEGIN))
    # A route priced for one tenant alone.
    assert (await book.tariff("m", principal(), BEGIN)).charge == own
    assert (await book.tariff("m", principal(), BEGIN)).cost == own
    assert (await book.tariff("m", principal(OTHER), BEGIN)).charge is None

    listed = await book.set_price(ACTOR, price_spec("m", "1", "2", effective_from=BEGIN - TICK))
    usage = TokenUsage(1000, 100)
    marked = await book.tariff("m", principal(OTHER, 2_000), BEGIN)
    assert (marked.charge, marked.cost, marked.applied_markup_bp) == (listed, listed, 2_000)
    assert (marked.charged(usage), marked.cost_of(usage)) == (1_440_000, 1_200_000)
    theirs = await book.tariff("m", principal(ACME, 2_000), BEGIN)
    assert (theirs.charge, theirs.cost, theirs.applied_markup_bp) == (own, listed, 0)
    assert (theirs.charged(usage), theirs.cost_of(usage)) == (5_600_000, 1_200_000)
    assert theirs.cost_price_id == listed.id
    assert (await book.tariff("m", principal(), BEGIN - TICK)).charge == listed

    cost = await book.set_price(ACTOR, price_spec("m", "0.5", "0.5", basis="cost", effective_from=BEGIN))
    assert (await book.tariff("m", principal(), BEGIN)).cost == cost
    assert (await book.tariff("m", principal(OTHER), BEGIN)).cost == cost
    assert await book.prices("m") == [listed, cost, own]
    assert await book.prices("m", tenant=str(ACME)) == [own]
    assert await book.prices("m", basis="cost") == [cost]


async def test_a_price_that_ends_makes_way(book: PriceBook, clock: ManualClock, engine: AsyncEngine) -> None:
    now = clock.now()
    listed = await book.set_price(ACTOR, price_spec("m", "1", "2", effective_from=now))
    own = await book.set_price(ACTOR, price_spec("m", "5", "6", tenant="acme", effective_from=now))
    coming = await book.set_price(ACTOR, price_spec("m", "7", "8", effective_from=now + timedelta(days=1)))
    ended = await book.end_price(ACTOR, own.id, now + timedelta(hours=1))
    assert ended == replace(own, effective_until=now + timedelta(hours=1))
    assert (await book.tariff("m", principal(), now + timedelta(hours=1) - TICK)).charge == ended
    assert (await book.tariff("m", principal(), now + timedelta(hours=1))).charge == listed
    # One that has not begun never does, and makes no gap.
    withdrawn = await book.end_price(ACTOR, coming.id)
    assert withdrawn.effective_until == coming.effective_from
    assert await book.price("m", now + timedelta(days=2)) == listed
    with pytest.raises(StateConflict, match="before it began"):
        await book.end_price(ACTOR, coming.id, now + timedelta(days=3))
    instead = await book.set_price(ACTOR, price_spec("m", "9", "9", effective_from=coming.effective_from))
    assert await book.price("m", now + timedelta(days=2)) == instead
    await book.end_price(ACTOR, instead.id)
    clock.advance(7200)
    with pytest.raises(ConfigurationError, match="already"):
        await book.end_price(ACTOR, own.id)
    # Postgres keeps what lies beyond Python's calendar, and then no price could be read any more.
    beyond = datetime.fromisoformat("9999-12-31T23:59:59-12:00")
    for moment in (clock.now() - TICK, datetime(2030, 1, 1), beyond):  # noqa: DTZ001
        with pytest.raises(ConfigurationError, match="now or later"):
            await book.end_price(ACTOR, listed.id, moment)
    with pytest.raises(UnknownPrice):
        await book.end_price(ACTOR, uuid4())
    audited = await fetch(engine, "SELECT * FROM audit_log WHERE kind = 'price' AND action = 'update' ORDER BY id")
    assert [(row["target"], row["tenant_id"]) for row in audited] == [
        (str(own.id), ACME),
        (str(coming.id), None),
        (str(instead.id), None),
    ]
    assert audited[0]["before"] == {"effective_until": None}
    assert audited[0]["after"]["effective_until"].startswith("2024-06-03T13:00:00")


async def test_a_price_holds_its_moment_in_any_zone(book: PriceBook) -> None:
    local = datetime.fromisoformat("2026-06-01T00:00:00+02:00")
    price = await book.set_price(ACTOR, price_spec("m", "1", "2", effective_from=local))
    assert await book.price("m", datetime(2026, 5, 31, 22, tzinfo=UTC)) == price
    assert await book.price("m", datetime(2026, 5, 31, 21, 59, tzinfo=UTC)) is None


async def test_every_rate_is_kept_to_the_last_place_and_audited(book: PriceBook, engine: AsyncEngine) -> None:
    rates = {name: Decimal("0.123456789") + index for index, name in enumerate(RATES)}
    spec = price_spec("m", "1", "2", compute_ceiling_s=2.5, effective_from=BEGIN)
    price = await book.set_price(ACTOR, msgspec.structs.replace(spec, **rates))
    assert {name: getattr(await book.price("m", BEGIN), name) for name in RATES} == rates
    assert await book.prices("m") == [price]
    (row,) = await fetch(engine, "SELECT * FROM audit_log WHERE kind = 'price'")
    assert (row["actor"], row["action"], row["target"], row["before"]) == ("admin-1", "create", str(price.id), None)
    assert row["after"]["reasoning_usd_per_mtok"] == "4.123456789"


async def test_a_price_once_set_does_not_change(book: PriceBook) -> None:
    first = await book.set_price(ACTOR, price_spec("m", "1", "2", effective_from=BEGIN))
    with pytest.raises(AlreadyExists, match="already"):
        await book.set_price(ACTOR, price_spec("m", "3", "4", effective_from=BEGIN))
    assert await book.prices("m") == [first]


async def test_prices_need_a_route_and_a_tenant_that_are_there(book: PriceBook) -> None:
    for name in ("n", "", "\x00", "\ud800"):
        with pytest.raises(UnknownRoute):
            await book.set_price(ACTOR, price_spec(name, "1", "2"))
        with pytest.raises(UnknownRoute):
            await book.prices(name)
        with pytest.raises(UnknownTenant):
            await book.set_price(ACTOR, price_spec("m", "1", "2", tenant=name))
    with pytest.raises(UnknownTenant):
        await book.prices("m", tenant=str(uuid4()))


@pytest.mark.parametrize(
    "change",
    [
        {"effective_from": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"effective_from": datetime(1970, 1, 1, tzinfo=UTC)},
        {"effective_from": datetime(9999, 1, 1, tzinfo=UTC)},
        {"input_usd_per_mtok": Decimal("0.000003")},
        {"reasoning_usd_per_mtok": Decimal("-1")},
        {"usd_per_request": Decimal(1001)},
        {"compute_usd_per_hour": Decimal(2)},
        {"compute_ceiling_s": 10.0},
        {"compute_usd_per_hour": Decimal(2), "compute_ceiling_s": 0.0},
        {"compute_usd_per_hour": Decimal(2), "compute_ceiling_s": float("nan")},
        {"compute_usd_per_hour": Decimal(2), "compute_ceiling_s": 1e9},
        {"compute_usd_per_hour": Decimal("0.0001"), "compute_ceiling_s": 1.0},
        {"basis": "cost", "tenant": "acme"},
        {"basis": "gift"},
        {"source": "a\x00b"},
    ],
)
def test_prices_that_cannot_be_meant_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        checked(msgspec.structs.replace(price_spec("m", "1", "2"), **change))


@pytest.mark.parametrize(
    "value", ["", "x", "NaN", "-1", "Infinity", "0.000003", "3e-06", "10001", "1e30", "0.1234567891"]
)
def test_absurd_rates_are_refused_with_their_unit(value: str) -> None:
    with pytest.raises(ConfigurationError, match="input_usd_per_mtok"):
        parse_rate("input_usd_per_mtok", value)


@given(st.decimals("0.0001", "10000", places=9))
def test_rates_are_read_exactly(rate: Decimal) -> None:
    assert parse_rate("output_usd_per_mtok", str(rate)) == rate


@given(st.sampled_from(list(RATES)), st.text(max_size=60))
def test_any_text_is_a_rate_or_a_clear_error(name: str, text: str) -> None:
    try:
        rate = parse_rate(name, text)
    except ConfigurationError:
        return
    assert 0 <= rate <= 10_000


async def test_changes_elsewhere_are_seen_within_the_cache_time(
    book: PriceBook, engine: AsyncEngine, clock: ManualClock
) -> None:
    other = PriceBook(engine, clock, cache_s=5.0)
    assert await other.price("m", clock.now()) is None
    price = await book.set_price(ACTOR, price_spec("m", "1", "2"))
    clock.advance(4.9)
    assert await other.price("m", clock.now()) is None
    clock.advance(0.1)
    assert await other.price("m", clock.now()) == price


async def test_prices_are_read_again_only_if_one_was_set_or_ended(
    book: PriceBook, engine: AsyncEngine, clock: ManualClock
) -> None:
    other = PriceBook(engine, clock, cache_s=5.0)
    first = await book.set_price(ACTOR, price_spec("m", "1", "2"))
    seen = await other.price("m", clock.now())
    assert seen == first
    clock.advance(5)
    assert await other.price("m", clock.now()) is seen
    await book.end_price(ACTOR, first.id, clock.now() + timedelta(seconds=10))
    clock.advance(5)
    ended = await other.price("m", clock.now())
    assert ended is not None
    assert ended.effective_until == clock.now() + timedelta(seconds=5)
    clock.advance(5)
    assert await other.price("m", clock.now()) is None


async def test_a_hosted_models_price_is_taken_over(book: PriceBook) -> None:
    at = datetime(2026, 11, 1, tzinfo=UTC)
    found = await book.hosted_price("m", "openai", "gpt-4o", tenant="acme", effective_from=at)
    price = await book.set_price(ACTOR, found.spec)
    assert (price.input_usd_per_mtok, price.cached_input_usd_per_mtok, price.output_usd_per_mtok) == (
        Decimal("2.5"),
        Decimal("1.25"),
        Decimal(10),
    )
    assert price.source is not None
    assert price.source.startswith("genai-prices ")
    assert price.source.endswith(": openai/gpt-4o")
    assert (await book.prices("m", tenant="acme"))[0] == price
    with pytest.raises(UnknownRoute):
        await book.hosted_price("n", "openai", "gpt-4o")


def test_a_price_by_length_is_the_dearest_within_reach() -> None:
    at = datetime(2026, 11, 1, tzinfo=UTC)
    dearest = hosted_price("m", "google", "gemini-2.5-pro", at, basis="cost")
    assert (dearest.spec.input_usd_per_mtok, dearest.spec.output_usd_per_mtok) == (Decimal("2.5"), Decimal(15))
    assert "200,000" in " ".join(dearest.notes)
    assert "dearest" in " ".join(dearest.notes)
    assert dearest.spec.basis == "cost"
    # A route whose prompts are never so long pays what short ones cost.
    short = hosted_price("m", "google", "gemini-2.5-pro", at, longest_prompt=200_000)
    assert (short.spec.input_usd_per_mtok, short.spec.output_usd_per_mtok) == (Decimal("1.25"), Decimal(10))
    assert "dearest" not in " ".join(short.notes)


def test_a_price_of_a_day_is_that_days() -> None:
    old = hosted_price("m", "openai", "o3", datetime(2025, 6, 1, tzinfo=UTC))
    assert old.spec.input_usd_per_mtok == 10
    assert "2025-06-10" in " ".join(old.notes)
    assert hosted_price("m", "openai", "o3", datetime(2025, 6, 10, tzinfo=UTC)).spec.input_usd_per_mtok == 2


def test_what_is_not_known_or_not_priced_by_tokens_is_told() -> None:
    at = datetime(2026, 11, 1, tzinfo=UTC)
    for provider, model, words in (
        ("opnai", "gpt-4o", "did you mean openai"),
        ("openai", "gpt-4oo", "gpt-4o"),
        ("openai", "tts-1", "not priced by tokens"),
        ("\x00", "\ud800", "no provider"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            hosted_price("m", provider, model, at)
    notes = " ".join(hosted_price("m", "openai", "gpt-4o-2024-11-20", at).notes)
    assert "openai/gpt-4o" in notes
    assert "web_searches" in notes


def test_every_hosted_model_has_a_price_that_can_be_set_or_a_clear_error() -> None:
    from genai_prices.data import providers

    at = datetime(2026, 11, 1, tzinfo=UTC)
    imported = refused = 0
    for provider in providers:
        for model in provider.models:
            try:
                found = hosted_price("m", provider.id, model.id, at)
            except ConfigurationError:
                refused += 1
                continue
            checked(found.spec)
            imported += 1
    assert imported > 10 * refused
