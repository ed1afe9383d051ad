"""Whether a backend lives: a request that costs nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from gateway.apis import Family
from gateway.backends.backend import Backend
from gateway.backends.transport import Transport
from gateway.routing.route import Endpoint

CONNECT_S = 2.0


def prober(transport: Transport, backends: Mapping[Family, Backend]) -> Callable[[Endpoint], Awaitable[bool]]:
    """For ``gateway.routing.probes``. What it returns raises BackendFault where no answer comes."""

    async def lives(endpoint: Endpoint) -> bool:
        url, headers = backends[endpoint.family].probe(endpoint)
        reply = await transport.get(url, headers=headers, connect_s=CONNECT_S)
        try:
            return reply.status < 500
        finally:
            reply.close()

    return lives
