"""What the headers of a request say, and who is believed."""

from __future__ import annotations

import pytest

from worker.protocol.errors import ApiError
from worker.server.call import Call
from worker.server.door import Door

TRUSTED = {"authorization": "Bearer token"}
DOOR = Door("token", token_required=False)


def test_the_gateways_headers() -> None:
    headers = {
        "x-request-id": "id",
        "x-penstock-tenant": "acme",
        "x-penstock-tenant-salt": "salt",
        "x-penstock-weight": "2.5",
        "x-penstock-priority": "-3",
        "x-penstock-clamp-output": "1",
        "x-penstock-meter": "1",
    }
    assert DOOR.call(TRUSTED | headers) == Call("id", "salt", "acme", 2.5, -3, True, True)
    stranger = DOOR.call(headers)
    assert stranger == Call(stranger.request_id)
    assert stranger.request_id != "id"


def test_what_is_not_said_is_even() -> None:
    call = DOOR.call(TRUSTED)
    assert (call.tenant, call.weight, call.priority) == ("", 1.0, 0)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "", "heavy", "1e7", "1e-7", "9" * 5000])
def test_a_weight_is_a_number_above_zero(weight: str) -> None:
    with pytest.raises(ApiError, match="'x-penstock-weight' must be a number"):
        DOOR.call(TRUSTED | {"x-penstock-weight": weight})
    assert DOOR.call({"x-penstock-weight": weight}).weight == 1.0


def test_a_tenants_name_is_short() -> None:
    with pytest.raises(ApiError, match="'x-penstock-tenant' is over 256"):
        DOOR.call(TRUSTED | {"x-penstock-tenant": "x" * 257})
