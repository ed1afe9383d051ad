"""Run as a program by a test: one gateway process among several. Prints how many requests of each contest it got.

Arguments: the Redis URL, then contests as ``tenant id,requests per minute,slots,budget,bound,tries`` (0: no limit).
"""

from __future__ import annotations

import asyncio
import sys
from uuid import UUID

from gateway.admission.errors import Refused
from gateway.admission.service import Admission
from tests.gateway.admission.support import Ledger, admission, take, tenant


async def contest(gate: Admission, tenant_id: UUID, rpm: int, slots: int, budget: int, bound: int, tries: int) -> int:
    principal = tenant(rpm or None, slots or None, budget or None, tenant_id=tenant_id)
    outcomes = await asyncio.gather(*(take(gate, principal, bound) for _ in range(tries)), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Refused):
            raise outcome
    return sum(not isinstance(outcome, BaseException) for outcome in outcomes)


async def main(redis_url: str, contests: list[str]) -> None:
    async with admission(redis_url, Ledger(redis_url)) as gate:
        print("ready", flush=True)
        sys.stdin.readline()
        for text in contests:
            tenant_id, *numbers = text.split(",")
            rpm, slots, budget, bound, tries = map(int, numbers)
            print(await contest(gate, UUID(tenant_id), rpm, slots, budget, bound, tries), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
