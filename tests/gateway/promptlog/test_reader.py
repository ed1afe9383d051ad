"""A log read: lists without bodies, filters with a cursor, one entry whole, a text, feedback, an export."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec
import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.datakeys.master_keys import MasterKeys
from gateway.ids import uuid7
from gateway.policies.prompt_log import CustomPattern, PromptLogPolicy
from gateway.promptlog import reader as reader_module
from gateway.promptlog.entry import NotReplayable
from gateway.promptlog.filters import NO_FILTERS, BadCursor, Filters
from gateway.promptlog.reader import Page, Reader
from gateway.promptlog.search import Needle
from tests.gateway.datakeys.support import NEW, OLD
from tests.gateway.promptlog.support import ANN, BOB, FULL, METADATA, REDACTED, Rig, answer, body, entry
from tests.gateway.promptlog.support import rig as make_rig


async def every(reader: Reader, tenant_id: UUID, filters: Filters = NO_FILTERS, limit: int = 50) -> list[Page]:
    pages = [await reader.page(tenant_id, filters, limit=limit)]
    while (cursor := pages[-1].cursor) is not None:
        pages.append(await reader.page(tenant_id, filters, cursor=cursor, limit=limit))
    return pages


def ids(*pages: Page) -> list[UUID]:
    return [each.facts.request_id for page in pages for each in page.entries]


async def test_an_entry_comes_back_as_it_went_in(rig: Rig, acme: UUID, globex: UUID) -> None:
    given = entry(acme, end_user=ANN, error_code="timeout", cache="miss", client_request_id="mine", streamed=True)
    await rig.write(given)
    logged = await rig.reader.entry(acme, given.request_id)
    assert logged is not None
    facts = msgspec.structs.asdict(logged.facts)
    expected = msgspec.structs.asdict(given)
    assert (logged.request, logged.response) == (expected.pop("request"), expected.pop("response"))
    del expected["tenant_id"]
    sizes = {"request_bytes": len(given.request), "response_bytes": len(given.response)}
    assert facts == expected | sizes | {"level": "full"}
    assert await rig.reader.entry(globex, given.request_id) is None
    assert await rig.reader.entry(acme, uuid7()) is None
    assert ids(await rig.reader.page(globex)) == []


async def test_pages_go_from_the_newest_to_the_oldest_each_entry_once(rig: Rig, acme: UUID) -> None:
    given = [entry(acme, f"question {n}") for n in range(23)]
    await rig.write(*given)
    pages = await every(rig.reader, acme, limit=5)
    assert [len(page.entries) for page in pages] == [5, 5, 5, 5, 3]
    assert ids(*pages) == [each.request_id for each in reversed(given)]
    exact = await rig.reader.page(acme, limit=23)
    assert (len(exact.entries), exact.cursor) == (23, None)
    # What is written meanwhile moves nothing.
    first = await rig.reader.page(acme, limit=5)
    await rig.write(entry(acme))
    assert ids(await rig.reader.page(acme, cursor=first.cursor, limit=5)) == ids(pages[1])


async def test_each_filter_by_itself_and_all_together(rig: Rig, acme: UUID) -> None:
    now = datetime.now(UTC)
    odd = {
        "admitted_at": now - timedelta(minutes=20),
        "model": "other",
        "status": "failed",
        "end_user": BOB,
        "tags": ("blue", "green"),
        "project_id": UUID(int=7),
        "key_id": "pk2",
    }
    plain, all_odd = entry(acme, admitted_at=now), entry(acme, **odd)
    singly = {name: entry(acme, **{"admitted_at": now} | {name: value}) for name, value in odd.items()}
    await rig.write(plain, *singly.values(), all_odd)
    filters = {
        "model": Filters(model="other"),
        "status": Filters(status="failed"),
        "end_user": Filters(end_user=BOB),
        "tags": Filters(tag="green"),
        "project_id": Filters(project_id=UUID(int=7)),
        "key_id": Filters(key_id="pk2"),
        "admitted_at": Filters(until=now - timedelta(minutes=1)),
    }
    assert filters.keys() == odd.keys()
    for name, wanted in filters.items():
        found = set(ids(await rig.reader.page(acme, wanted)))
        assert found == {singly[name].request_id, all_odd.request_id}, name
    together = Filters(model="other", status="failed", end_user=BOB, tag="blue", project_id=UUID(int=7), key_id="pk2")
    assert ids(await rig.reader.page(acme, together)) == [all_odd.request_id]


async def test_times_are_of_the_admission_however_long_the_request_took(rig: Rig, acme: UUID) -> None:
    at = datetime.now(UTC) - timedelta(hours=3)
    late = entry(acme, admitted_at=at)
    await rig.write(late, entry(acme))
    for filters, expected in (
        (Filters(since=at, until=at + timedelta(milliseconds=1)), [late.request_id]),
        (Filters(until=at), []),
        (Filters(since=at + timedelta(milliseconds=1), until=at + timedelta(hours=1)), []),
    ):
        assert ids(await rig.reader.page(acme, filters)) == expected
    ends = [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
    assert len(ids(await rig.reader.page(acme, Filters(since=ends[0], until=ends[1])))) == 2
    assert ids(await rig.reader.page(acme, Filters(since=ends[1], until=ends[0]))) == []


async def test_a_rare_match_is_found_by_going_on(rig: Rig, acme: UUID, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "EXAMINED", 20)
    monkeypatch.setattr(reader_module, "BATCH", 7)
    rare = entry(acme, model="rare")
    await rig.write(rare, *(entry(acme) for _ in range(50)))
    for seconds, expected in ((60.0, [20, 20, 11]), (0.0, [7, 7, 7, 7, 7, 7, 7, 2])):
        monkeypatch.setattr(reader_module, "PAGE_S", seconds)
        pages = await every(rig.reader, acme, Filters(model="rare"))
        assert [page.examined for page in pages] == expected
        assert ids(*pages) == [rare.request_id]
        assert not any(page.entries for page in pages[:-1])


@pytest.mark.parametrize(
    "cursor", ["", "x", "1", "0-0", "00-0", "1-2-3", "-", "+", "(1-1", "1-1 COUNT", "9" * 30 + "-1"]
)
async def test_a_cursor_that_was_not_given_out_is_refused(rig: Rig, acme: UUID, cursor: str) -> None:
    with pytest.raises(BadCursor, match="leave it out"):
        await rig.reader.page(acme, cursor=cursor)


async def test_limits_have_bounds(rig: Rig, acme: UUID) -> None:
    for limit in (0, 501):
        with pytest.raises(ValueError, match="between 1 and 500"):
            await rig.reader.page(acme, limit=limit)


async def test_levels_keep_what_they_say(rig: Rig, acme: UUID) -> None:
    bare, blacked = entry(acme, "call 555123456"), entry(acme, "call 555123456")
    await rig.write(bare, policy=METADATA)
    await rig.write(blacked, policy=REDACTED)
    await rig.write(entry(acme), policy=PromptLogPolicy())
    assert ids(await rig.reader.page(acme)) == [blacked.request_id, bare.request_id]
    metadata = await rig.reader.entry(acme, bare.request_id)
    redacted = await rig.reader.entry(acme, blacked.request_id)
    assert metadata is not None
    assert redacted is not None
    assert (metadata.facts.level, metadata.request, metadata.response) == ("metadata", None, None)
    assert (redacted.request, redacted.response) == (body("call [DIGITS]"), answer("You asked: call [DIGITS]"))


async def test_what_was_asked_can_be_asked_again_if_it_is_there_whole(rig: Rig, acme: UUID) -> None:
    whole, blacked, bare, cut = (entry(acme, "call 555123456", end_user=ANN) for _ in range(4))
    await rig.write(whole)
    await rig.write(blacked, policy=REDACTED)
    await rig.write(bare, policy=METADATA)
    await rig.write(cut, policy=PromptLogPolicy(level="full", max_body_bytes=20))
    asked = await rig.reader.asked(acme, whole.request_id)
    assert asked is not None
    assert (asked.api, asked.model, asked.body, asked.redacted) == ("chat_completions", "m", whole.request, False)
    assert (asked.project_id, asked.end_user) == (whole.project_id, ANN)
    redacted = await rig.reader.asked(acme, blacked.request_id)
    assert redacted is not None
    assert (redacted.body, redacted.redacted) == (body("call [DIGITS]"), True)
    for each, why in ((bare, "without its body"), (cut, "was cut")):
        with pytest.raises(NotReplayable, match=why):
            await rig.reader.asked(acme, each.request_id)
    assert await rig.reader.asked(acme, uuid7()) is None


async def test_the_last_feedback_counts_in_lists_and_entries(rig: Rig, acme: UUID, globex: UUID) -> None:
    given = entry(acme)
    await rig.write(given)
    assert await rig.reader.feedback(acme, given.request_id, 1.0)
    assert await rig.reader.feedback(acme, given.request_id, 0, "it was Paris; see https://example.com")
    assert not await rig.reader.feedback(globex, given.request_id, 1)
    assert not await rig.reader.feedback(acme, uuid7(), 1)
    logged = await rig.reader.entry(acme, given.request_id)
    (listed,) = (await rig.reader.page(acme)).entries
    assert logged is not None
    for feedback in (logged.feedback, listed.feedback):
        assert feedback is not None
        assert (feedback.score, feedback.comment) == (0, "it was Paris; see https://example.com")
    for score in (-1.1, 2, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="score"):
            await rig.reader.feedback(acme, given.request_id, score)
    with pytest.raises(ValueError, match="2000 characters"):
        await rig.reader.feedback(acme, given.request_id, 1, "x" * 2001)


async def test_a_comment_is_redacted_as_its_entry_is(rig: Rig, acme: UUID) -> None:
    patterns = (CustomPattern("city", "Paris"),)
    for policy, comment, kept in (
        (FULL, "Paris 12345", "Paris 12345"),
        (REDACTED, "Paris 12345", "[CITY] [DIGITS]"),
        (METADATA, "Paris 12345", "[CITY] [DIGITS]"),
        (REDACTED, "1234 " * 400, ("[DIGITS] " * 400)[:2000]),
        (REDACTED, "explode", None),
    ):
        given = entry(acme)
        await rig.write(given, policy=policy)
        assert await rig.reader.feedback(acme, given.request_id, 1, comment, patterns=patterns)
        found = await rig.reader.entry(acme, given.request_id)
        assert found is not None
        assert found.feedback is not None
        assert (found.feedback.score, found.feedback.comment) == (1, kept)


async def test_a_text_is_found_in_either_body_whatever_its_case(rig: Rig, acme: UUID) -> None:
    asked = entry(acme, "Où est le CAFÉ ?", response=answer("here"))
    answered = entry(acme, "where?", response=answer('at the "Café" \n of the corner'))
    other = entry(acme, "nothing", response=b"no JSON at all", model="café")
    await rig.write(asked, answered, other)
    assert b"CAF\\u00c9" in asked.request, "as clients write it, in escapes"
    found = await rig.reader.scan(acme, "café")
    assert set(ids(found)) == {asked.request_id, answered.request_id}
    assert ids(await rig.reader.scan(acme, '"café" \n OF')) == [answered.request_id]
    assert ids(await rig.reader.scan(acme, "content")) == [], "the name of a field is not what was said"
    assert ids(await rig.reader.scan(acme, "NO json")) == [other.request_id]
    assert ids(await rig.reader.scan(acme, "café", Filters(model="other"))) == []
    for text in ("cafe\u0301", "CAFE\u0301"):
        assert set(ids(await rig.reader.scan(acme, text))) == {asked.request_id, answered.request_id}
    assert ids(await rig.reader.scan(acme, "cafe")) == []
    with pytest.raises(ValueError, match="empty"):
        await rig.reader.scan(acme, "")


@pytest.mark.parametrize(
    ("text", "sought"),
    [
        ("Straße", "STRASSE"),
        ("ΣΊΣΥΦΟΣ", "σίσυφος"),
        ("İstanbul", "i\u0307STANBUL"),
        ("ﬁn", "FIN"),
        ("가", "\u1100\u1161"),
    ],
)
def test_letters_are_folded_as_unicode_has_it(text: str, sought: str) -> None:
    for one, other in ((text, sought), (sought, text)):
        assert Needle(other).within(json.dumps({"content": f"- {one} -"}).encode())


@pytest.mark.parametrize("bound", ["EXAMINED", "SCAN_BYTES", "SCAN_S", "IN_FLIGHT_BYTES"])
async def test_a_scan_goes_on_where_it_stopped(
    rig: Rig, acme: UUID, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(reader_module, bound, {"EXAMINED": 4, "SCAN_BYTES": 1000, "SCAN_S": 0.0}.get(bound, 700))
    monkeypatch.setattr(reader_module, "BATCH", 4)
    given = [entry(acme, "needle" if n % 5 == 0 else "hay") for n in range(20)]
    await rig.write(*given)
    expected = [each.request_id for n, each in enumerate(given) if n % 5 == 0][::-1]
    for limit in (1, 3, 50):
        pages = [await rig.reader.scan(acme, "NEEDLE", limit=limit)]
        while (cursor := pages[-1].cursor) is not None:
            pages.append(await rig.reader.scan(acme, "NEEDLE", cursor=cursor, limit=limit))
        assert ids(*pages) == expected
        assert sum(page.examined for page in pages) == 20
        assert all(len(page.entries) <= limit for page in pages)
        assert len(pages) > 2 or bound == "IN_FLIGHT_BYTES"


async def test_an_export_is_a_line_for_each_entry_oldest_first(rig: Rig, acme: UUID) -> None:
    pretty = json.dumps({"model": "m", "messages": [], "seed": 1e300}, indent=2).encode()
    given = [
        entry(acme, end_user=ANN),
        entry(acme, request=pretty, response=b'{"cut": "he'),
        entry(acme, request=b"\xff{}", response=b"", model="other"),
    ]
    await rig.write(*given)
    await rig.write(entry(acme), policy=METADATA)
    await rig.reader.feedback(acme, given[0].request_id, -1, "wrong")
    lines = [line async for line in rig.reader.export(acme)]
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    told = [json.loads(line) for line in lines]
    assert [each["entry"]["request_id"] for each in told[:3]] == [str(each.request_id) for each in given]
    assert told[0]["request"] == json.loads(given[0].request)
    assert told[0]["feedback"]["comment"] == "wrong"
    assert (told[1]["request"], told[1]["response"]) == (json.loads(pretty), '{"cut": "he')
    assert (told[2]["request"], told[2]["response"]) == ("�{}", None)
    assert (told[3]["entry"]["level"], told[3]["request"]) == ("metadata", None)
    chosen = [json.loads(line) async for line in rig.reader.export(acme, Filters(model="other"))]
    assert [each["entry"]["request_id"] for each in chosen] == [str(given[2].request_id)]


async def test_an_export_ends_with_what_was_there_when_it_began(
    rig: Rig, acme: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "BATCH", 2)
    given = [entry(acme) for _ in range(5)]
    await rig.write(*given)
    lines = 0
    async for _ in rig.reader.export(acme, Filters(until=datetime.now(UTC) + timedelta(days=1))):
        lines += 1
        await rig.write(entry(acme))
    assert lines == 5
    assert [line async for line in rig.reader.export(uuid7())] == []


async def test_bodies_that_redis_evicted_are_missing_and_the_list_stands(rig: Rig, acme: UUID) -> None:
    given = entry(acme)
    await rig.write(given, policy=FULL)
    await rig.redis.command("DEL", f"pl:{acme}:e:{given.request_id}")
    assert ids(await rig.reader.page(acme)) == [given.request_id]
    (line,) = [json.loads(line) async for line in rig.reader.export(acme)]
    assert (line["request"], line["response"]) == (None, None)
    assert ids(await rig.reader.scan(acme, "France")) == []
    assert await rig.reader.entry(acme, given.request_id) is None


async def test_entries_stay_readable_while_and_after_the_master_key_changes(
    rig: Rig, acme: UUID, engine: AsyncEngine
) -> None:
    given = [entry(acme), entry(acme, end_user=ANN), entry(acme, end_user=BOB)]
    await rig.write(*given)
    expected = [each.request_id for each in reversed(given)]
    async with make_rig(rig.url, engine, master_keys=MasterKeys(NEW, OLD)) as changing:
        assert ids(await changing.reader.page(acme)) == expected
        assert await changing.data_keys.rewrap() == 3
        # One that was not restarted yet knows its keys for some seconds still, and so goes on.
        await rig.write(last := entry(acme, end_user=ANN))
    async with make_rig(rig.url, engine, master_keys=MasterKeys(NEW)) as after:
        assert ids(await after.reader.page(acme)) == [last.request_id, *expected]
        logged = await after.reader.entry(acme, given[1].request_id)
        assert logged is not None
        assert logged.request == given[1].request
