"""An entry made what Redis keeps: cut only after it was redacted, sealed for its place, small in a list."""

from __future__ import annotations

from uuid import UUID, uuid4

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.datakeys.data_key import DataKey
from gateway.policies.prompt_log import CustomPattern, PromptLogPolicy
from gateway.promptlog import sealing
from gateway.promptlog.entry import Entry, Kept
from gateway.promptlog.sealing import NotRedacted, Packed, Unreadable, pack, shortened, unpack_body, unpack_metadata
from gateway.redaction import Redactor
from tests.gateway.promptlog.support import FULL, METADATA, REDACTED, Digits, entry

TENANT = uuid4()
KEY = DataKey(uuid4(), bytes(range(32)))


def packed(given: Entry, policy: PromptLogPolicy = FULL) -> Packed:
    return pack(shortened(given, policy), policy, KEY, Digits)


def metadata(of: Packed) -> Kept:
    return unpack_metadata(of.metadata, KEY, TENANT, of.request_id)


def request(of: Packed) -> bytes:
    return unpack_body(of.request, KEY, TENANT, of.request_id, "request")


def test_a_part_opens_in_its_place_alone() -> None:
    whole = packed(entry(TENANT))
    assert request(whole) == entry(TENANT).request
    others: list[tuple[UUID, UUID, str]] = [
        (uuid4(), whole.request_id, "request"),
        (TENANT, uuid4(), "request"),
        (TENANT, whole.request_id, "response"),
    ]
    for tenant_id, request_id, part in others:
        with pytest.raises(Unreadable):
            unpack_body(whole.request, KEY, tenant_id, request_id, part)
    with pytest.raises(Unreadable):
        unpack_metadata(whole.request, KEY, TENANT, whole.request_id)


def test_what_is_no_longer_understood_is_unreadable_and_not_a_fault() -> None:
    whole = packed(entry(TENANT))
    for value in (b"", b"\xc1", msgspec.msgpack.encode({"level": "full"})):
        sealed = KEY.seal(value, sealing._context(TENANT, whole.request_id, "metadata"))
        with pytest.raises(Unreadable):
            unpack_metadata(sealed, KEY, TENANT, whole.request_id)
    broken = KEY.seal(b"not zstd", sealing._context(TENANT, whole.request_id, "request"))
    with pytest.raises(Unreadable):
        unpack_body(broken, KEY, TENANT, whole.request_id, "request")


def test_fields_that_are_new_or_gone_do_not_make_old_entries_unreadable() -> None:
    whole = packed(entry(TENANT))
    told = msgspec.to_builtins(metadata(whole), builtin_types=(bytes,))
    del told["tags"]
    sealed = KEY.seal(
        msgspec.msgpack.encode(told | {"of_a_later_release": 1}),
        sealing._context(TENANT, whole.request_id, "metadata"),
    )
    assert unpack_metadata(sealed, KEY, TENANT, whole.request_id).tags == ()


def test_half_a_surrogate_pair_costs_no_entry() -> None:
    odd = entry(TENANT, model="m\ud800", tags=("ok", "\udfffx"), client_request_id="\ud800", end_user="a" * 32)
    kept = metadata(packed(odd))
    assert (kept.model, kept.tags, kept.client_request_id) == ("m?", ("ok", "?x"), "?")
    assert (kept.end_user, kept.admitted_at) == (odd.end_user, odd.admitted_at)


def test_a_list_costs_little() -> None:
    assert len(packed(entry(TENANT, request=b"x" * 50_000)).metadata) < 600


def test_metadata_alone_holds_no_body_not_even_in_the_queue() -> None:
    held = shortened(entry(TENANT), METADATA)
    assert (held.request, held.response) == (b"", b"")
    whole = packed(entry(TENANT), METADATA)
    assert (whole.request, whole.response) == (b"", b"")
    assert (metadata(whole).request_bytes, metadata(whole).request_cut) == (0, False)


@given(st.text(max_size=60), st.integers(0, 100))
def test_a_body_is_cut_between_characters_and_says_so(text: str, limit: int) -> None:
    body = text.encode()
    whole = packed(entry(TENANT, request=body), PromptLogPolicy(level="full", max_body_bytes=limit))
    kept = request(whole) if whole.request else b""
    assert body.startswith(kept)
    assert kept.decode() is not None
    assert limit - 3 <= len(kept) <= limit or kept == body
    assert metadata(whole).request_cut == (kept != body)
    assert metadata(whole).request_bytes == len(kept)


def test_a_cut_that_came_before_is_told_too() -> None:
    whole = packed(entry(TENANT, response_cut=True))
    assert (metadata(whole).request_cut, metadata(whole).response_cut) == (False, True)


@pytest.mark.parametrize("parsed", [40, 10_000])
@pytest.mark.parametrize("before", range(30, 62))
def test_no_part_of_a_secret_stands_at_the_cut(parsed: int, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # As text after a first cut, or redacted whole: either way the secret lies across some end.
    monkeypatch.setattr(sealing, "MARGIN", 24)
    monkeypatch.setattr(sealing, "MOST_PARSED", parsed)
    body = b"x" * before + b"-1234567890123456-" + b"y" * 200
    policy = PromptLogPolicy(level="redacted", max_body_bytes=50)
    whole = packed(entry(TENANT, request=body), policy)
    assert not any(digit in request(whole) for digit in b"1234567890")
    assert len(request(whole)) <= 50
    assert metadata(whole).request_cut


def test_texts_that_were_cut_before_keep_no_part_of_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of several choices of a stream that became too long: each of their texts may end within one."""
    monkeypatch.setattr(sealing, "MARGIN", 24)
    for shift in range(20):
        texts = ["x" * shift + "y" * 40 + " 1234567890123456"[: 2 + shift] for _ in range(2)]
        choices = [{"message": {"role": "assistant", "content": text}} for text in texts]
        response = msgspec.json.encode({"id": "c", "choices": choices, "usage": {"total_tokens": 123}})
        whole = packed(entry(TENANT, response=response, response_cut=True), REDACTED)
        kept = msgspec.json.decode(unpack_body(whole.response, KEY, TENANT, whole.request_id, "response"))
        assert (kept["id"], kept["choices"][1]["message"]["role"]) == ("c", "assistant")
        for choice in kept["choices"]:
            content = choice["message"]["content"]
            assert content.startswith("x" * shift + "y")
            assert not any(each.isdigit() for each in content)
    for broken in (b'{"content": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx 123', b"[" * 9000 + b"123"):
        whole = packed(entry(TENANT, response=broken, response_cut=True), REDACTED)
        kept = unpack_body(whole.response, KEY, TENANT, whole.request_id, "response") if whole.response else b""
        assert b"123" not in kept


@pytest.mark.parametrize("count", [3, 8, 20])
def test_much_that_becomes_shorter_uncovers_nothing(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "MARGIN", 24)
    monkeypatch.setattr(sealing, "MOST_PARSED", 40)
    policy = PromptLogPolicy(level="redacted", max_body_bytes=100)
    for shift in range(20):
        body = b"x" * shift + b"1234567890123456 " * count + b"y" * 100
        whole = packed(entry(TENANT, request=body), policy)
        kept = request(whole) if whole.request else b""
        assert not any(digit in kept for digit in b"1234567890")


def test_a_tenant_s_own_patterns() -> None:
    policy = PromptLogPolicy(level="redacted", patterns=(CustomPattern("city", "France|Paris"),))
    assert b"capital of [CITY]" in request(packed(entry(TENANT), policy))


def test_what_cannot_be_redacted_is_not_kept() -> None:
    with pytest.raises(NotRedacted) as told:
        packed(entry(TENANT, "explode: hunter2"), REDACTED)
    assert str(told.value) == "ValueError"
    assert told.value.__cause__ is None
    assert packed(entry(TENANT, "explode"), FULL).request


@pytest.mark.parametrize("parsed", [40_000, 10_000_000])
def test_the_built_in_kinds_at_a_cut(parsed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "MOST_PARSED", parsed)
    policy = PromptLogPolicy(level="redacted", max_body_bytes=30_000)
    for before in range(29_880, 30_001, 7):
        text = "x" * before + " mail ann.smith@example.com or pay by 4111 1111 1111 1111 " + "words " * 4000
        given = entry(TENANT, text)
        whole = pack(shortened(given, policy), policy, KEY, Redactor)
        kept = request(whole)
        assert not any(part in kept for part in (b"ann", b"smith", b"example", b"4111", b"1111"))
        assert len(kept) <= 30_000
    whole = pack(entry(TENANT, "mail ann@example.com"), policy, KEY, Redactor)
    assert b"mail [EMAIL]" in request(whole)
