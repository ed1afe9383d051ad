"""Run as a program by a test: a gateway process to be killed. Admits, and settles when told to, while Redis is away.

Arguments: the Redis URL, the spool's folder, a tenant's id, how many requests.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from uuid import UUID

from gateway.billing.usage import TokenUsage
from tests.gateway.admission.support import Ledger, admission, take, tenant


async def main(redis_url: str, folder: str, tenant_id: str, number: str) -> None:
    principal = tenant(budget=10**9, tenant_id=UUID(tenant_id))
    async with admission(redis_url, Ledger(redis_url), timeout_s=0.5, spool_dir=Path(folder)) as gate:
        tickets = [await take(gate, principal, 50_000) for _ in range(int(number))]
        print("admitted", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        for ticket in tickets:
            ticket.settle("ok", TokenUsage(10, 5))
        await asyncio.gather(*(ticket.settled() for ticket in tickets))
        print("settled", flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
