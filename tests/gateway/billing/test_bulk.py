from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.billing.bulk import NotPlain, record_plain
from gateway.billing.entries import (
    LATEST_AHEAD,
    MAX_AMOUNT,
    MAX_ATTEMPT_TEXT,
    MAX_ATTEMPTS,
    MAX_COMPUTE_US,
    MAX_KEY_TEXT,
    MAX_MS,
    MAX_NOTE_TEXT,
    MAX_TAG_TEXT,
    MAX_TAGS,
    MAX_TOKENS,
)
from gateway.billing.ledger import ROW_FAULTS
from gateway.billing.ledger_writer import LedgerWriter, RawEntry
from gateway.billing.usage import UsageEvent
from gateway.db.engine import transaction
from gateway.db.partitions import partition_ddl
from gateway.ids import uuid7
from tests.gateway.billing.support import (
    GOOD,
    NOON,
    SHARD,
    assert_consistent,
    fetch,
    full_event,
    rows_of,
    usage_event,
    wild_changes,
)
from tests.gateway.db.support import ManualClock, opened

FULL = msgspec.json.encode(full_event(failed_attempts=["w-0 backend_timeout"], error_code="e"))
"""Has a value of its kind in every field."""
ODD_VALUES: dict[str, Sequence[Any]] = {
    "request_id": ["", None, str(uuid7()).upper(), uuid7().hex, f"{{{uuid7()}}}", 7],
    "admitted_at": [
        "2024-06-03T12:00:00+00:00",
        "2024-06-03T12:00:00",
        "2024-06-03 12:00:00Z",
        "2024-06-03T12:00:60Z",
        "2024-06-03T24:00:00Z",
        "2024-06-31T12:00:00Z",
        "2024-06-03T12:00:00.1234567Z",
        "2019-12-31T23:59:59Z",
        "infinity",
        "now",
        None,
        1717416000,
    ],
    "key_id": ["", "k" * (MAX_KEY_TEXT + 1), None, 7, True, {"a": 1}],
    "backend": ["w" * (MAX_KEY_TEXT + 1), 1],
    "error_code": ["x" * (MAX_NOTE_TEXT + 1), "\0"],
    "status": ["fine", None],
    "usage_source": ["guessed", None],
    "prompt_tokens": [-1, MAX_TOKENS + 1, None, "7", 7.0, 7.5, True, 2**63],
    "charged_nano_usd": [-1, MAX_AMOUNT + 1, "1", 1.0, None],
    "cost_nano_usd": [-1, MAX_AMOUNT + 1],
    "compute_us": [-1, MAX_COMPUTE_US + 1, None],
    "markup_bp": [-10_001, 1_000_001, 2**31],
    "attempts": [-1, 10_001, None],
    "total_ms": [-1, MAX_MS + 1],
    "streamed": [None, "true", 1, "yes"],
    "price_id": ["", "none"],
    "tags": [
        ["b", "a"],
        ["a", "a"],
        ["ä", "z"],
        [""],
        [None],
        [["a"]],
        "a",
        None,
        {},
        [1],
        ["t" * (MAX_TAG_TEXT + 1)],
        [f"{number:02d}" for number in range(MAX_TAGS + 1)],
    ],
    "failed_attempts": [["a"] * (MAX_ATTEMPTS + 1), ["x" * (MAX_ATTEMPT_TEXT + 1)], [None], [["a"], ["b"]], None, [1]],
    "unknown": [1],
}
ODD_SPELLINGS: dict[str, Callable[[bytes], bytes]] = {
    "spaces": lambda raw: raw.replace(b":", b": "),
    "a space behind": lambda raw: raw + b" ",
    "an exponent": lambda raw: raw.replace(b'"prompt_tokens":9', b'"prompt_tokens":9e0'),
    "another order": lambda raw: b'{"api":"chat_completions",' + raw[1:].replace(b',"api":"chat_completions"', b""),
    "a field twice": lambda raw: raw[:-1] + b',"prompt_tokens":9}',
    "a field missing": lambda raw: raw.replace(b',"api":"chat_completions"', b""),
    "needless escapes": lambda raw: raw.replace(b'"key"', rb'"\u006bey"'),
    "two events": lambda raw: raw + b"\x1e" + raw,
    "two events, as JSON has them": lambda raw: raw + b"," + raw,
    "half an event": lambda raw: raw[:-10],
    "a list": lambda raw: b"[" + raw + b"]",
    "null": lambda _: b"null",
    "nothing": lambda _: b"",
    "a separator": lambda raw: raw.replace(b'"key"', b'"k\x1ey"'),
    "a lone surrogate": lambda raw: raw.replace(b'"key"', rb'"k\ud800"'),
    "NUL": lambda raw: raw + b"\0",
    "no UTF-8": lambda raw: raw.replace(b'"key"', b'"k\xff"'),
    "too deep": lambda _: b"[" * 100_000,
}


@pytest.fixture(autouse=True)
def partition(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(partition_ddl(NOON))


async def _record(engine: AsyncEngine, *raws: bytes) -> None:
    async with transaction(engine, timeout_s=10) as connection:
        await record_plain(connection, [(raw, b"1") for raw in raws], NOON)


_LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")


def _texts(longest: int, least: int = 0) -> st.SearchStrategy[str]:
    return st.text(_LETTERS, min_size=least, max_size=longest)


def _optional(longest: int) -> st.SearchStrategy[str | None]:
    return st.none() | _texts(longest)


@given(
    st.fixed_dictionaries(
        {
            "key_id": _texts(MAX_KEY_TEXT, 1),
            "backend": _optional(MAX_KEY_TEXT),
            "client_request_id": _optional(MAX_NOTE_TEXT),
            "error_code": _optional(MAX_NOTE_TEXT),
            "tags": st.lists(_texts(MAX_TAG_TEXT, 1), max_size=MAX_TAGS).map(lambda tags: sorted(set(tags))),
            "failed_attempts": st.lists(_texts(MAX_ATTEMPT_TEXT), max_size=MAX_ATTEMPTS),
            "admitted_at": st.timedeltas(timedelta(0), timedelta(days=20)).map(lambda after: NOON + after),
            "charged_nano_usd": st.integers(0, MAX_AMOUNT),
            "first_token_ms": st.none() | st.integers(0, MAX_MS),
            "streamed": st.booleans(),
        }
    )
)
@example(dict.fromkeys(("key_id", "backend", "client_request_id"), "".join(map(chr, range(1, 128)))))
@example({"key_id": "\u2028\ufeff\uffff\U0010ffff", "tags": ["\uffff", "\U00010000"]})
@example({"cached_tokens": MAX_TOKENS, "compute_us": MAX_COMPUTE_US, "markup_bp": -10_000, "attempts": 10_000})
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_what_we_write_is_plain_and_becomes_its_row(database_url: str, changes: dict[str, Any]) -> None:
    event = full_event(**changes)

    async def main() -> None:
        async with opened(database_url, pool_size=1) as engine:
            await _record(engine, msgspec.json.encode(event))
            (row,) = await fetch(engine, f"SELECT * FROM usage_events WHERE request_id = '{event.request_id}'")
            assert row.pop("recorded_at") is not None
            assert row == msgspec.structs.asdict(event) | {"revision": 1}
            await assert_consistent(engine)

    asyncio.run(main())


async def test_what_is_odd_is_not_plain(engine: AsyncEngine) -> None:
    odd = [
        (name, value, msgspec.json.encode(json.loads(FULL) | {name: value}))
        for name, values in ODD_VALUES.items()
        for value in values
    ]
    odd += [("spelling", kind, change(FULL)) for kind, change in ODD_SPELLINGS.items()]
    far = usage_event(admitted_at=NOON + LATEST_AHEAD + timedelta(seconds=1))
    odd.append(("admitted_at", far.admitted_at, msgspec.json.encode(far)))
    for name, value, raw in odd:
        good = msgspec.json.encode(usage_event())
        assert raw != FULL, (name, value)
        for batch in ([raw], [good, raw], [raw, good]):
            try:
                await _record(engine, *batch)
            except (NotPlain, *ROW_FAULTS):
                continue
            pytest.fail(f"{name}: {value!r} was written")
    assert await rows_of(engine) == []
    assert await fetch(engine, "SELECT * FROM usage_rollup") == []


async def test_what_is_known_is_not_plain(engine: AsyncEngine) -> None:
    raws = [msgspec.json.encode(usage_event()) for _ in range(3)]
    await _record(engine, *raws[:2])
    with pytest.raises(NotPlain):
        await _record(engine, *raws[1:])
    assert len(await rows_of(engine)) == 2
    await assert_consistent(engine)


class _Careful(LedgerWriter):
    async def _write_plain(self, batch: object) -> bool:
        return False


class _Plain(LedgerWriter):
    async def _write_carefully(self, shard: str, batch: object) -> None:
        raise AssertionError("it was plain")


async def test_the_ordinary_needs_no_care(engine: AsyncEngine) -> None:
    writer = _Plain(engine, ManualClock())
    events = [full_event(), usage_event(), usage_event(price_id=None, status="failed")]
    # As Redis writes its own time of admission.
    raws = [msgspec.json.encode(event).replace(b"12:00:00Z", b"12:00:00.123Z") for event in events]
    entries: list[RawEntry] = [(b"1-0", [b"event", raw, b"revision", b"2", b"again", b"1"]) for raw in raws]
    twice = [(b"2-0", [b"event", raws[0], b"revision", b"1"]), *entries, entries[1]]
    assert await writer.write({SHARD: twice, "{s08}": [(b"1-0", [b"event", FULL, b"revision", b"1"])]}) == {}
    assert [row["revision"] for row in await rows_of(engine)] == [1, 2, 2, 2]
    await assert_consistent(engine)


def _entry(number: int, raw: bytes, revision: bytes = b"1") -> RawEntry:
    return f"{number}-0".encode(), [b"event", raw, b"revision", revision]


@st.composite
def _settlements(draw: st.DrawFn) -> list[tuple[bytes, bytes]]:
    """Of one request: its revisions, some of them twice, plain or odd or poison."""
    base: UsageEvent = draw(st.sampled_from([usage_event, full_event]))(
        request_id=uuid7(),
        admitted_at=NOON + timedelta(minutes=draw(st.integers(0, 40))),
        tenant_id=UUID(int=draw(st.integers(1, 2))),
        key_id=draw(st.sampled_from(["a", "B", "ä"])),
    )
    found: list[tuple[bytes, bytes]] = []
    for revision in range(1, draw(st.integers(1, 3)) + 1):
        event = msgspec.structs.replace(
            base,
            status=draw(st.sampled_from(["ok", "aborted"])),
            backend=draw(st.sampled_from([None, "", "w"])),
            charged_nano_usd=draw(st.integers(0, MAX_AMOUNT)),
        )
        found += [(msgspec.json.encode(event), b"%d" % revision)] * draw(st.integers(1, 2))
    return found


@st.composite
def _odd(draw: st.DrawFn) -> list[tuple[bytes, bytes]]:
    raw = FULL.replace(GOOD["request_id"].encode(), str(uuid7()).encode())
    changes: dict[str, Any] = draw(wild_changes())
    changed = json.dumps(json.loads(raw) | {"request_id": str(uuid7())} | changes, separators=(",", ":")).encode()
    spelled = draw(st.sampled_from(sorted(ODD_SPELLINGS)).map(ODD_SPELLINGS.__getitem__))(raw)
    return [(draw(st.sampled_from([changed, spelled, b"{"])), draw(st.sampled_from([b"1", b"01", b"", b"1001"])))]


async def _tables(engine: AsyncEngine) -> list[list[dict[str, Any]]]:
    await assert_consistent(engine)
    events = [row | {"recorded_at": None} for row in await rows_of(engine)]
    rollup = await fetch(engine, "SELECT * FROM usage_rollup WHERE requests > 0 ORDER BY 1, 2, 3, 4, 5, 6, 7")
    dead = await fetch(engine, "SELECT shard, entry_id, raw, revision FROM dead_usage_events ORDER BY 1, 2")
    return [events, rollup, dead]


@given(st.lists(_settlements() | _settlements() | _odd(), min_size=1, max_size=6), st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_all_ways_come_to_the_same(
    database_url: str, settlements: list[list[tuple[bytes, bytes]]], data: st.DataObject
) -> None:
    ordered = data.draw(st.permutations([one for some in settlements for one in some]))
    entries = [_entry(number, raw, revision) for number, (raw, revision) in enumerate(ordered)]
    cut = data.draw(st.integers(0, len(entries)))
    batch = {SHARD: entries[:cut], "{s08}": entries[cut:]}
    again = data.draw(st.booleans())

    async def main() -> None:
        async with opened(database_url, pool_size=2) as engine:

            async def written(writer: type[LedgerWriter], *, at_once: bool) -> list[list[dict[str, Any]]]:
                async with transaction(engine, timeout_s=10) as connection:
                    for table in ("usage_events", "usage_rollup", "dead_usage_events"):
                        await connection.execute(text(f"DELETE FROM {table}"))
                one = writer(engine, ManualClock())
                parts = [{shard: some} for shard, some in batch.items()] if at_once else [batch]
                faults = await asyncio.gather(*map(one.write, parts))
                if again:
                    faults.append(await one.write(batch))
                assert not any(faults)
                return await _tables(engine)

            expected = await written(_Careful, at_once=False)
            assert await written(LedgerWriter, at_once=False) == expected
            assert await written(LedgerWriter, at_once=True) == expected

    asyncio.run(main())
