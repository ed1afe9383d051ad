from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.idempotency.scope import LONG_BODY_BYTES, checked_key, find_scope, scope_of
from gateway.ids import uuid7
from gateway.secret_key import SecretKey
from tests.gateway.idempotency.support import PATH, SECRET, scope, tenant
from worker.protocol.errors import ApiError


def test_the_same_request_has_the_same_scope() -> None:
    principal = tenant()
    assert scope(principal) == scope(replace(principal, generation=7))


def test_whatever_differs_makes_another_entry_and_another_body_only_another_body() -> None:
    principal = tenant()
    mine = scope(principal)
    others = [
        scope(principal, key="K"),
        scope(principal, path="/v1/embeddings"),
        scope(replace(principal, key_id="key2")),
        scope(replace(principal, tenant_id=uuid7())),
        scope_of(
            SecretKey("another-secret-key-of-the-tests-of-this-room"), principal, "/v1/chat/completions", "k", b"{}"
        ),
    ]
    assert len({mine.hash, *(other.hash for other in others)}) == 1 + len(others)
    spaced = scope(principal, body=b"{ }")
    assert spaced.hash == mine.hash
    assert spaced.body != mine.body


def test_all_redis_keys_carry_the_tag_of_the_tenant_and_neither_key_nor_body() -> None:
    principal = tenant()
    found = scope(principal, key="order-4711", body=b"secret").keys
    assert len(set(found)) == 4
    assert all(key.startswith(principal.shard + ":idempotency:") for key in found)
    assert not any("order-4711" in key or "secret" in key for key in found)


async def test_a_long_body_has_the_same_scope_in_a_thread() -> None:
    principal = tenant()
    body = b"x" * (LONG_BODY_BYTES + 1)
    assert await find_scope(SECRET, principal, PATH, "k", body) == scope(principal, body=body)


@pytest.mark.parametrize("key", ["a", "~" * 255, "8e03978e-40d5-43e8-bc93-6894a57f9324", '"quoted"'])
def test_visible_ascii_is_a_key(key: str) -> None:
    assert checked_key(key) == key


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "é", "a\n", "\x7f", "\t"])
def test_anything_else_is_refused_by_name(key: str) -> None:
    with pytest.raises(ApiError, match="'idempotency-key'") as caught:
        checked_key(key)
    assert caught.value.status == 400
    assert caught.value.body.code == "invalid_idempotency_key"


def test_the_hashes_need_the_secret() -> None:
    principal = tenant()
    other = SecretKey("yet-another-secret-key-of-these-tests")
    assert scope_of(SECRET, principal, "/", "k", b"{}").body != scope_of(other, principal, "/", "k", b"{}").body
