"""The admin API against its own OpenAPI document: wild requests get documented answers, and never a 5xx.

``SCHEMA_EXAMPLES=400 SCHEMA_SEED=2`` runs longer, and another way.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = int(os.environ.get("SCHEMA_EXAMPLES", "4"))
SEED = int(os.environ.get("SCHEMA_SEED", "1"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
]


@pytest.mark.schema
@pytest.mark.timeout(60 + 60 * EXAMPLES)
async def test_wild_requests_get_documented_answers(gateway: Any) -> None:
    await asyncio.to_thread(_drive, gateway.url, gateway.admin_key)


def _drive(url: str, admin_key: str) -> None:
    headers = {"authorization": f"Bearer {admin_key}"}
    with httpx.Client(base_url=url, headers=headers) as client:
        schema: Any = schemathesis.openapi.from_dict(client.get("/docs/openapi.json").json())
        seen = 0
        faults: list[Exception] = []
        for found in schema.include(path_regex="^/admin/").get_all_operations():
            operation = found.ok()
            known = _things(client, seen)
            if "admin-keys" in operation.path:
                known["key"] = known["admin_key"]
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                try:
                    _drive_operation(operation, mode, known, url, headers)
                except Exception as fault:
                    faults.append(fault)
            seen += 1
    if faults:
        raise ExceptionGroup("the admin API does not keep to its document", faults)
    assert seen > 40


def _drive_operation(
    operation: Any, mode: GenerationMode, known: dict[str, str], url: str, headers: dict[str, str]
) -> None:
    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), real=st.integers(0, 3))
    def drive(case: Any, real: int) -> None:
        for name in case.path_parameters or {}:
            if real and name in known:  # most cases get past the 404
                case.path_parameters[name] = known[name]
        for place in (case.query, case.body):
            if real and isinstance(place, dict) and isinstance(place.get("tenant"), str):
                place["tenant"] = known["tenant"]
        response = case.call(base_url=url, headers=headers)
        case.validate_response(response, checks=CHECKS)

    drive()


def _things(client: httpx.Client, number: int) -> dict[str, str]:
    """Names of things of their own for the requests of one operation."""

    def made(path: str, **body: Any) -> Any:
        answer = client.post(f"/admin/v1/{path}", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()

    name = f"a{number}"
    tenant = made("tenants", name=name)["id"]
    made("pools", name=name)
    made("routes", name=name, pool="pool", context_length=1000)
    return {
        "tenant": tenant,
        "project": made(f"tenants/{tenant}/projects", name=name)["id"],
        "key": made(f"tenants/{tenant}/keys", name=name)["id"],
        "limit_id": made(f"tenants/{tenant}/limits", metric="concurrent", amount=5)["id"],
        "pool": name,
        "route": name,
        "backend": made("backends", name=name, pool="pool", brand="generic", base_url="http://127.0.0.1:1")["name"],
        "price": made("prices", route=name, input_usd_per_mtok="1", output_usd_per_mtok="2")["id"],
        "admin_key": made("admin-keys", name=name, role="viewer")["id"],
        "month": "2026-11",
    }
