"""Limits through the door: what is refused, how it is said, and that refusals use nothing up, on two replicas."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import httpx
import openai
import pytest

from tests.e2e.stack import BIN, MODEL, Stack, eventually
from tests.ports import free_port

pytestmark = pytest.mark.e2e

HI = [{"role": "user", "content": "Say hi."}]


@pytest.fixture(scope="module")
def replicas(shared_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Base URLs of two gateways on the same Redis and Postgres."""
    port = free_port()
    with (tmp_path_factory.mktemp("second") / "gateway.log").open("wb") as log:
        second = subprocess.Popen(
            [BIN / "penstock", "serve", "--port", str(port)],
            cwd=shared_stack.folder,
            env=shared_stack.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: _ready(url), limit_s=40, what="the second gateway")
            yield [shared_stack.url, url]
        finally:
            second.terminate()
            second.wait(15)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def tenant(stack: Stack, *options: str) -> tuple[str, str]:
    """A new tenant's name and key."""
    name = f"t-{uuid4().hex[:8]}"
    stack.operator("tenant", "create", name, *options)
    shown = stack.operator("key", "create", "--tenant", name)
    return name, next(word for word in shown.split() if word.startswith("sk-penstock-"))


def ask(url: str, key: str, max_tokens: int = 4) -> tuple[int, str | None, openai.APIStatusError | None]:
    """Status, error code and exception of one whole request."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        try:
            client.chat.completions.create(model=MODEL, messages=HI, max_tokens=max_tokens, temperature=0)  # type: ignore[arg-type]
        except openai.APIStatusError as fault:
            return fault.status_code, fault.code, fault
        return 200, None, None


def test_requests_per_minute_are_shared_by_replicas(stack: Stack, replicas: list[str]) -> None:
    name, key = tenant(stack, "--requests-per-minute", "5")
    with ThreadPoolExecutor(12) as pool:
        outcomes = list(pool.map(lambda index: ask(replicas[index % 2], key), range(12)))
    assert [status for status, _, _ in outcomes].count(200) == 5
    refusals = [fault for _, _, fault in outcomes if fault is not None]
    assert len(refusals) == 7
    for fault in refusals:
        assert isinstance(fault, openai.RateLimitError)
        assert fault.code == "rate_limit_exceeded"
        assert 1 <= int(fault.response.headers["retry-after"]) <= 61
        assert fault.response.headers["x-ratelimit-limit-requests"] == "5"
        assert fault.response.headers["x-ratelimit-remaining-requests"] == "0"
    rows = eventually(lambda: _rows(stack, name, 5), what="five rows")
    assert {row["status"] for row in rows} == {"ok"}


def test_a_spent_budget_is_insufficient_quota(stack: Stack, replicas: list[str]) -> None:
    # Room for one request's worst case, not for two: the prompt, counted or bounded by its bytes and the template's
    # allowance, at 100 nano-USD a token, the cap at 400.
    name, key = tenant(stack, "--budget", "0.0006")
    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(lambda index: ask(replicas[index % 2], key, max_tokens=1000), range(6)))
    served = [status for status, _, _ in outcomes].count(200)
    assert served >= 1
    for status, code, fault in outcomes:
        if status != 200:
            assert (status, code) == (429, "insufficient_quota")
            assert fault is not None
            assert fault.body["type"] == "insufficient_quota"  # type: ignore[index]
    assert served < 6
    rows = eventually(lambda: _rows(stack, name, served), what="rows")
    assert sum(row["charged_nano_usd"] for row in rows) <= 600_000
    stack.operator("tenant", "set", name, "--budget", "0")
    assert ask(replicas[0], key)[:2] == (429, "insufficient_quota")
    stack.operator("tenant", "set", name, "--budget", "1")
    assert ask(replicas[1], key)[0] == 200


def test_concurrent_requests_are_slots_that_come_back(stack: Stack, replicas: list[str]) -> None:
    _, key = tenant(stack, "--max-concurrent", "2")
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a long story about the sea."}],
        "max_tokens": 600,
        "temperature": 0.9,
        "seed": 1,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {key}"}
    url = f"{replicas[0]}/v1/chat/completions"
    with (
        httpx.stream("POST", url, json=body, headers=headers, timeout=60) as first,
        httpx.stream("POST", url, json=body, headers=headers, timeout=60) as second,
    ):
        assert (first.status_code, second.status_code) == (200, 200)
        # An iterator that is dropped closes its stream.
        lines = [answer.iter_lines() for answer in (first, second)]
        assert all(next(each).startswith("data: ") for each in lines)
        status, code, fault = ask(replicas[1], key)
        assert (status, code) == (429, "rate_limit_exceeded")
        assert fault is not None
        assert "retry-after" in fault.response.headers
    # Both clients have left: their slots are free before their leases could have ended.
    eventually(lambda: ask(replicas[1], key)[0] == 200, limit_s=5, what="a slot")


def test_a_revoked_key_is_refused_by_every_replica_at_once(stack: Stack, replicas: list[str]) -> None:
    _, key = tenant(stack)
    assert [ask(url, key)[0] for url in replicas] == [200, 200]
    stack.operator("key", "revoke", key.split("-")[2])
    assert [ask(url, key)[0] for url in replicas] == [401, 401]


def test_a_key_for_some_models_lists_and_calls_only_those(stack: Stack) -> None:
    name, _ = tenant(stack)
    shown = stack.operator("key", "create", "--tenant", name, "--model", "some-other-model")
    key = next(word for word in shown.split() if word.startswith("sk-penstock-"))
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.get(f"{stack.url}/v1/models", headers=headers).json()["data"] == []
    assert ask(stack.url, key)[:2] == (404, "model_not_found")


def _rows(stack: Stack, name: str, count: int) -> list[dict[str, object]] | None:
    rows = stack.rows("tenant_id = (SELECT id FROM tenants WHERE name = %s)", name)
    return rows if len(rows) >= count else None


def test_usage_json_is_exact(stack: Stack) -> None:
    name, key = tenant(stack)
    assert ask(stack.url, key)[0] == 200
    (row,) = eventually(lambda: _rows(stack, name, 1), what="row")
    report = json.loads(stack.cli("usage", "--tenant", name, "--json"))
    assert str(row["charged_nano_usd"]).rstrip("0") in json.dumps(report)
