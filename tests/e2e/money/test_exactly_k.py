"""Limits hold to the last request on several gateways at once, for tenants that nobody has heard of before."""

from __future__ import annotations

import asyncio

import pytest

from gateway.tenants.directory import LimitSpec
from gateway.tenants.principal import Metric, Subject
from tests.e2e.money.fleet import BODIES, CHARGE, CHAT, PROMPT, Answer, Fleet, until

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="package")]

K = 5
ASKED = 4 * K
CODES = {
    "budget": "insufficient_quota",
    "concurrent": "rate_limit_exceeded",
    "requests": "rate_limit_exceeded",
    "tokens": "rate_limit_exceeded",
}


async def worst_case(fleet: Fleet, name: str, path: str = CHAT) -> tuple[int, int]:
    """Nano-USD and tokens that one request reserves."""
    key = await fleet.tenant(name)
    fleet.backend.hold()
    asked = asyncio.create_task(fleet.ask(key, 0, path=path, user="ann"))
    await until(lambda: fleet.backend.asked, "the backend is asked")
    bounds = [
        (int(bound), int(tokens))
        for _, bound, tokens in await fleet.reservations((await fleet.directory.tenant(name)).id)
    ]
    fleet.backend.release()
    assert (await asked).outcome == "ok"
    [found] = bounds
    assert found[1] > BODIES[path].get("max_tokens", PROMPT)
    return found


@pytest.mark.parametrize("subject", ["tenant", "project", "key", "model", "end_user", "each"])
@pytest.mark.parametrize("metric", ["budget", "concurrent", "requests", "tokens"])
async def test_exactly_k_of_4k_requests_are_served(fleet: Fleet, metric: Metric, subject: Subject | str) -> None:
    name = f"k-{metric}-{subject}"
    nano_usd, tokens = await worst_case(fleet, f"probe-{metric}-{subject}")
    amount = {"budget": K * nano_usd, "tokens": K * tokens}.get(metric, K)
    target = {"project": "default", "model": "m", "end_user": "ann"}.get(subject, "")
    window = {"budget": "month", "concurrent": None}.get(metric, "minute")
    of: Subject = "end_user" if subject == "each" else subject  # type: ignore[assignment]
    key = await fleet.tenant(name, LimitSpec(subject=of, target=target, metric=metric, window=window, amount=amount))  # type: ignore[arg-type]

    fleet.backend.hold()
    refused: list[Answer] = []

    async def ask(number: int) -> Answer:
        answer = await fleet.ask(key, number, stream=number % 2 == 0, user="ann")
        if answer.outcome != "ok":
            refused.append(answer)
        return answer

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(ask(number)) for number in range(ASKED)]
        await until(lambda: len(refused) >= ASKED - K, "the rest is refused")
        await until(lambda: fleet.backend.asked >= K, "as many as fit are served")
        fleet.backend.release()
    served = [answer for answer in (task.result() for task in running) if answer.outcome == "ok"]
    assert (len(served), len(refused), fleet.backend.asked) == (K, ASKED - K, K)
    assert {(answer.status, answer.code) for answer in refused} == {(429, CODES[metric])}

    found = await fleet.settled()
    assert (found.differences, found.busy, found.running) == ([], [], 0)
    rows = await fleet.rows(name)
    assert {str(row.request_id) for row in rows} == {answer.request_id for answer in served}
    assert sum(row.charged_nano_usd for row in rows) == K * CHARGE
    if metric == "budget":
        [budget] = await fleet.budgets((await fleet.directory.tenant(name)).id)
        assert (budget.spent, budget.reserved) == (K * CHARGE, 0)
        # What is left takes another worst case as long as there is one, to the last digit.
        left = amount - K * CHARGE
        more = [await fleet.ask(key, number, user="ann") for number in range(left // CHARGE + 2)]
        fits = 0
        while left >= nano_usd:
            left, fits = left - CHARGE, fits + 1
        assert [answer.outcome for answer in more] == ["ok"] * fits + ["refused"] * (len(more) - fits)


@pytest.mark.parametrize("path", [path for path in BODIES if path != CHAT])
async def test_it_is_exactly_k_through_every_other_door(fleet: Fleet, path: str) -> None:
    name = path.rpartition("/")[2]
    nano_usd, _ = await worst_case(fleet, f"probe-{name}", path)
    key = await fleet.tenant(name, LimitSpec(metric="budget", window="month", amount=K * nano_usd))
    fleet.backend.hold()
    refused: list[Answer] = []

    async def ask(number: int) -> Answer:
        answer = await fleet.ask(key, number, path=path, stream=number % 2 == 0 and name == "completions")
        if answer.outcome != "ok":
            refused.append(answer)
        return answer

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(ask(number)) for number in range(ASKED)]
        await until(lambda: len(refused) >= ASKED - K, "the rest is refused")
        await until(lambda: fleet.backend.asked >= K, "as many as fit are served")
        fleet.backend.release()
    served = [answer for answer in (task.result() for task in running) if answer.outcome == "ok"]
    assert (len(served), len(refused), fleet.backend.asked) == (K, ASKED - K, K)
    assert {(answer.status, answer.code) for answer in refused} == {(429, "insufficient_quota")}
    assert (await fleet.settled()).differences == []
    rows = await fleet.rows(name)
    assert {str(row.request_id) for row in rows} == {answer.request_id for answer in served}
    charge = PROMPT * 1000 if name == "embeddings" else CHARGE
    assert [(row.status, row.charged_nano_usd) for row in rows] == [("ok", charge)] * K
    assert nano_usd > charge
