"""The least that a gateway of this make can do: Litestar on uvicorn, each request handed to the backend by aiohttp.

No keys, no limits, no ledger, no reading of what is relayed.
``python benchmarks/gateway_passthrough.py PORT BACKEND_URL``.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvicorn
from litestar import Litestar, Request, Response, post
from litestar.response import Stream

_sessions: list[aiohttp.ClientSession] = []


@asynccontextmanager
async def _session(_app: Litestar) -> AsyncIterator[None]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(sys.argv[2], connector=connector, auto_decompress=False) as session:
        _sessions.append(session)
        yield


@post("/v1/chat/completions", status_code=200)
async def relay(request: Request[Any, Any, Any]) -> Response[Any]:
    body = await request.body()
    reply = await _sessions[0].post("/v1/chat/completions", data=body, headers={"content-type": "application/json"})
    media_type = reply.headers.get("content-type", "application/json")
    if media_type.startswith("text/event-stream"):
        return Stream(reply.content.iter_any(), media_type=media_type, status_code=reply.status)
    return Response(await reply.read(), media_type=media_type, status_code=reply.status)


if __name__ == "__main__":
    uvicorn.run(
        Litestar([relay], lifespan=[_session], logging_config=None, openapi_config=None),
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )
