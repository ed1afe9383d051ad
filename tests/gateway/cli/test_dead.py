from __future__ import annotations

import asyncio

import msgspec
from sqlalchemy import text

from gateway.billing.ledger import bury
from gateway.db.engine import transaction
from tests.gateway.billing.support import SHARD, fetch, usage_event
from tests.gateway.cli.conftest import Penstock, ok, refused
from tests.gateway.db.support import opened


async def _bury(url: str, *raws: bytes) -> list[str]:
    async with opened(url, pool_size=1) as engine:
        async with transaction(engine) as connection:
            await connection.execute(text("ALTER TABLE usage_events ADD CONSTRAINT curse CHECK (route <> 'cursed')"))
            for number, raw in enumerate(raws):
                await bury(connection, SHARD, f"{number}-0", raw, 1, "was \x1b[31mcursed")
        return [str(row["id"]) for row in await fetch(engine, "SELECT id FROM dead_usage_events ORDER BY id")]


async def _lift(url: str) -> None:
    async with opened(url, pool_size=1) as engine, transaction(engine) as connection:
        await connection.execute(text("ALTER TABLE usage_events DROP CONSTRAINT curse"))


def test_dead_events_are_shown_retried_and_discarded(penstock: Penstock, database_url: str) -> None:
    assert "none" in ok(penstock("dead", "list"))
    events = [usage_event(), usage_event(route="cursed")]
    good, cursed, broken = asyncio.run(
        _bury(database_url, *(msgspec.json.encode(event) for event in events), b'{"\x1b\xff')
    )
    lines = [line.split() for line in ok(penstock("dead", "list")).splitlines()]
    assert [line[0] for line in lines] == ["ID", good, cursed, broken]
    shown = ok(penstock("dead", "show", broken))
    assert '{"?\\xff' in shown
    assert "\x1b" not in shown
    refused(penstock("dead", "show", "999999"), "penstock dead list")
    refused(penstock("dead", "retry"), "--all")
    refused(penstock("dead", "retry", good, "--all"), "--all")

    mixed = penstock("dead", "retry", "--all")
    assert mixed.exit_code == 1
    assert mixed.stdout == f"{good} is recorded: request {events[0].request_id}\n"
    assert f"{cursed} stays: Postgres refuses it" in mixed.stderr
    assert f"{broken} stays: it cannot be read" in mixed.stderr
    asyncio.run(_lift(database_url))
    # One that somebody else has seen to keeps none of the others from being retried.
    retried = penstock("dead", "retry", good, cursed)
    assert retried.exit_code == 1
    assert f"{good} is gone" in retried.stderr
    assert str(events[1].request_id) in retried.stdout
    ok(penstock("dead", "discard", broken))
    assert "none" in ok(penstock("dead", "list"))
    audited = [line.split()[2:5] for line in ok(penstock("audit")).splitlines()[1:]]
    assert audited == [
        ["discard", "dead_event", broken],
        ["retry", "dead_event", cursed],
        ["retry", "dead_event", good],
    ]
