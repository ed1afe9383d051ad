from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from gateway.ids import uuid7
from gateway.secret_key import SecretKey
from gateway.tenants.end_users import end_user_hash

KEY = SecretKey("secret-key-of-the-tests-of-end-users")
TENANT = uuid7()


@given(st.text(), st.text())
def test_a_hash_names_one_id(one: str, other: str) -> None:
    hashed = end_user_hash(KEY, TENANT, one)
    assert re.fullmatch("[0-9a-f]{32}", hashed)
    assert (hashed == end_user_hash(KEY, TENANT, other)) == (one == other)


def test_it_differs_between_tenants_and_between_deployments() -> None:
    mine = end_user_hash(KEY, TENANT, "alice")
    assert mine != end_user_hash(KEY, uuid7(), "alice")
    assert mine != end_user_hash(SecretKey("secret-key-of-another-deployment-of-it"), TENANT, "alice")


def test_half_a_surrogate_pair_is_an_id_too() -> None:
    assert end_user_hash(KEY, TENANT, "\ud800") != end_user_hash(KEY, TENANT, "\ud801")
