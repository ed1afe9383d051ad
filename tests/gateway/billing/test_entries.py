from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.billing.entries import (
    LATEST_AHEAD,
    MAX_AMOUNT,
    MAX_ATTEMPT_TEXT,
    MAX_ATTEMPTS,
    MAX_KEY_TEXT,
    MAX_NOTE_TEXT,
    MAX_TAG_TEXT,
    MAX_TAGS,
    MAX_TOKENS,
    BadEntry,
    raw_of,
    read_entry,
)
from tests.gateway.billing.support import GOOD, NOON, usage_event, wild_changes

PARTS = ("cached_tokens", "cache_write_tokens", "reasoning_tokens", "images", "compute_us")


def _fields(raw: bytes, revision: bytes = b"1") -> dict[bytes, bytes]:
    return {b"event": raw, b"revision": revision}


def test_an_event_reads_back() -> None:
    event = usage_event(client_request_id="ünïcode 🚰", error_code=None, first_token_ms=0, total_ms=17, cached_tokens=0)
    entry = read_entry("1-0", _fields(msgspec.json.encode(event), b"2"), NOON)
    assert (entry.id, entry.event, entry.revision) == ("1-0", event, 2)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_entry_or_a_clear_error(raw: bytes) -> None:
    with pytest.raises(BadEntry):
        read_entry("1-0", _fields(raw), NOON)


@given(wild_changes())
def test_any_json_is_an_entry_that_postgres_can_hold_or_a_clear_error(changes: dict[str, Any]) -> None:
    raw = json.dumps(GOOD | changes).encode()
    try:
        event = read_entry("1-0", _fields(raw), NOON).event
    except BadEntry as fault:
        assert str(fault).isprintable() or "\n" in str(fault)
        assert len(str(fault)) < 1000
        return
    for name in ("charged_nano_usd", "cost_nano_usd"):
        assert 0 <= getattr(event, name) <= MAX_AMOUNT
    for name in ("prompt_tokens", "completion_tokens", *PARTS):
        assert 0 <= getattr(event, name) <= MAX_TOKENS * 10
    assert -10_000 <= event.markup_bp <= 1_000_000
    assert event.admitted_at.tzinfo is not None
    for name in ("key_id", "route", "backend", "end_user", "error_code", "client_request_id"):
        value = getattr(event, name)
        assert value is None or ("\0" not in value and len(value) <= MAX_NOTE_TEXT)
        msgspec.json.encode(value)  # no lone surrogate
    assert len(event.tags) <= MAX_TAGS
    assert event.tags == sorted(set(event.tags))
    for tag in event.tags:
        assert 0 < len(tag) <= MAX_TAG_TEXT
        assert "\0" not in tag
        msgspec.json.encode(tag)


@given(st.sampled_from(["\x00", "\ud800", "a\udfff\x00b"]), st.sampled_from(["key_id", "route", "client_request_id"]))
def test_strange_characters_are_replaced(strange: str, name: str) -> None:
    event = read_entry("1-0", _fields(json.dumps(GOOD | {name: strange + "é"}).encode()), NOON).event
    expected = "".join("\N{REPLACEMENT CHARACTER}" if c in "\x00\ud800\udfff" else c for c in strange) + "é"
    assert getattr(event, name) == expected


def test_broken_utf8_is_replaced() -> None:
    raw = json.dumps(GOOD | {"client_request_id": "@"}).encode().replace(b"@", b"\xff\xc3")
    assert read_entry("1-0", _fields(raw), NOON).event.client_request_id == "\N{REPLACEMENT CHARACTER}" * 2


def test_what_only_explains_is_cut_and_what_identifies_is_not() -> None:
    long = json.dumps(GOOD | {"error_code": "x" * 10_000}).encode()
    assert read_entry("1-0", _fields(long), NOON).event.error_code == "x" * MAX_NOTE_TEXT
    for name in ("key_id", "route"):
        with pytest.raises(BadEntry, match=name):
            read_entry("1-0", _fields(json.dumps(GOOD | {name: "x" * (MAX_KEY_TEXT + 1)}).encode()), NOON)
        with pytest.raises(BadEntry, match=name):
            read_entry("1-0", _fields(json.dumps(GOOD | {name: ""}).encode()), NOON)


def test_a_silly_duration_does_not_keep_money_out() -> None:
    raw = json.dumps(GOOD | {"first_token_ms": -5, "total_ms": 10**30, "queue_ms": -1, "attempts": -1}).encode()
    event = read_entry("1-0", _fields(raw), NOON).event
    assert (event.first_token_ms, event.total_ms, event.queue_ms, event.attempts) == (None, None, None, 0)


def test_failed_attempts_are_bounded_and_clean() -> None:
    told = ["w1 backend_timeout", "w2 \0", *(f"w{number} " + "x" * 10_000 for number in range(50))]
    raw = json.dumps(GOOD | {"failed_attempts": told, "api": "messages"}).encode()
    event = read_entry("1-0", _fields(raw), NOON).event
    assert event.failed_attempts[:2] == ["w1 backend_timeout", "w2 \N{REPLACEMENT CHARACTER}"]
    assert len(event.failed_attempts) == MAX_ATTEMPTS
    assert {len(attempt) for attempt in event.failed_attempts[2:]} == {MAX_ATTEMPT_TEXT}
    assert event.api == "messages"


def test_tags_are_bounded_in_number_and_length_sorted_and_each_once() -> None:
    given_ = [f"t{number:03d}" for number in range(100)]
    raw = json.dumps(GOOD | {"tags": [*reversed(given_), "t000", "", "a" * 10_000, "a\0b"]}).encode()
    tags = read_entry("1-0", _fields(raw), NOON).event.tags
    assert tags == ["a" * MAX_TAG_TEXT, "a\N{REPLACEMENT CHARACTER}b", *given_[: MAX_TAGS - 2]]


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(("value", "kept"), [(-1, 0), (0, 0), (10**30, None)])
def test_a_silly_part_does_not_keep_money_out(name: str, value: int, kept: int | None) -> None:
    event = read_entry("1-0", _fields(json.dumps(GOOD | {name: value}).encode()), NOON).event
    assert getattr(event, name) == (kept if kept is not None else 10**13 if name == "compute_us" else MAX_TOKENS)
    assert event.charged_nano_usd == GOOD["charged_nano_usd"]


def test_an_end_user_and_a_backend_are_no_longer_than_an_index_takes() -> None:
    raw = json.dumps(GOOD | {"end_user": "\U0001f6b0" * 10_000, "backend": "b" * 10_000}).encode()
    event = read_entry("1-0", _fields(raw), NOON).event
    assert (event.end_user, event.backend) == ("\U0001f6b0" * MAX_KEY_TEXT, "b" * MAX_KEY_TEXT)


@pytest.mark.parametrize("name", ["charged_nano_usd", "cost_nano_usd", "prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("value", [-1, 2**53, 2**63, 10**30, 1.5, "7", None, True])
def test_amounts_and_tokens_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(BadEntry):
        read_entry("1-0", _fields(json.dumps(GOOD | {name: value}).encode()), NOON)


@pytest.mark.parametrize(
    "moment",
    ["2026-11-29T12:00:00", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "2019-12-31T23:59:59Z", "", "x", 1],
)
def test_times_out_of_range_are_refused(moment: object) -> None:
    with pytest.raises(BadEntry):
        read_entry("1-0", _fields(json.dumps(GOOD | {"admitted_at": moment}).encode()), NOON)


def test_a_clock_a_little_ahead_is_no_fault() -> None:
    event = usage_event(admitted_at=NOON + LATEST_AHEAD)
    assert read_entry("1-0", _fields(msgspec.json.encode(event)), NOON).event == event
    late = usage_event(admitted_at=NOON + LATEST_AHEAD + timedelta(seconds=1))
    with pytest.raises(BadEntry, match="admitted_at"):
        read_entry("1-0", _fields(msgspec.json.encode(late)), NOON)


@pytest.mark.parametrize("revision", [b"", b"0", b"-1", b"x", b"1.0", b"99999999999", "\u0661".encode(), b"1\x00"])
def test_revisions_are_small_positive_numbers(revision: bytes) -> None:
    with pytest.raises(BadEntry, match="revision"):
        read_entry("1-0", _fields(msgspec.json.encode(usage_event()), revision), NOON)


def test_an_entry_without_an_event_is_kept_as_it_is() -> None:
    with pytest.raises(BadEntry, match="event"):
        read_entry("1-0", {b"other": b"\xff"}, NOON)
    assert raw_of({b"other": b"\xff"}) == repr({b"other": b"\xff"}).encode()
    assert raw_of({b"event": b"\x00\xff"}) == b"\x00\xff"


def test_deep_nesting_is_a_clear_error() -> None:
    with pytest.raises(BadEntry):
        read_entry("1-0", _fields(b"[" * 200_000), NOON)
