"""What an HTTP client costs as the gateway's transport: ``python benchmarks/transports.py [--json] [--quick]``.

Each client asks a mock backend (``gateway_upstream.py``, a process of its own) for whole answers at 1, 16 and 64 at a
time, and for streams of 32 events at 16 at a time, reading what comes as it comes. Told are CPU time of this process
for a request, and latency above that of a bare socket, which parses nothing and is the least that can be had. The
clients take turns and the median round counts: compare within one run, for figures move with the machine.

- ``transport``: the gateway's own
- ``aiohttp``: aiohttp as sparingly as it can be used: no cookies, no redirects, no headers of its own, no decompression
- ``httpx``: httpx with its own connection pool
- ``httpx-aiohttp``: httpx with aiohttp beneath, from the package of that name
- ``pyreqwest``: reqwest, in Rust, from the package of that name

What is not installed is left out, and said.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import package_first  # noqa: F401 - a script beside this one bears the package's name
import uvloop
from yarl import URL

from gateway.backends.decompression import PIECE
from gateway.backends.transport import Transport

HEADERS: Final = {
    "content-type": "application/json",
    "accept": "text/event-stream",
    "accept-encoding": "identity",
    "authorization": "Bearer a-token-as-long-as-they-are",
    "x-request-id": "01980000-0000-7000-8000-000000000000",
}
CONCURRENT: Final = (1, 16, 64)
STREAMS_AT_ONCE: Final = 16
ROUNDS: Final = 5

Ask = Callable[[bytes], Awaitable[int]]
"""Sends a body; returns the size of the answer, read whole."""
Client = Callable[[str], AbstractAsyncContextManager[Ask]]


def body(*, stream: bool) -> bytes:
    message = {"role": "user", "content": "A prompt of usual length. " * 20}
    return json.dumps({"model": "m", "stream": stream, "messages": [message]}).encode()


@asynccontextmanager
async def bare_socket(url: str) -> AsyncIterator[Ask]:
    """Knows where an answer ends from the one it read before by the same body."""
    host, port = url.removeprefix("http://").split(":")
    head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(body: bytes) -> int:
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port), limit=2**20)
        request = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\n{head}content-length: {len(body)}\r\n\r\n"
        writer.write(request.encode() + body)
        size = 0
        end = b"0\r\n\r\n" if b'"stream": true' in body else b"}"
        while chunk := await reader.read(65536):
            size += len(chunk)
            if chunk.endswith(end):
                break
        idle.append((reader, writer))
        return size

    yield ask
    for _, writer in idle:
        writer.close()


@asynccontextmanager
async def transport(url: str) -> AsyncIterator[Ask]:
    async with Transport() as own:

        async def ask(body: bytes) -> int:
            reply = await own.post(url + "/v1/chat/completions", headers=HEADERS, body=body, connect_s=5.0)
            size = 0
            while chunk := await reply.read_some():
                size += len(chunk)
            reply.close()
            return size

        yield ask


@asynccontextmanager
async def aiohttp_own(url: str) -> AsyncIterator[Ask]:
    import aiohttp

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=5.0),
        auto_decompress=False,
        skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
    ) as session:
        target = URL(url + "/v1/chat/completions")

        async def ask(body: bytes) -> int:
            size = 0
            async with session.post(target, headers=HEADERS, data=body, allow_redirects=False) as answer:
                while chunk := await answer.content.read(PIECE):
                    size += len(chunk)
            return size

        yield ask


def _asking(client: Any, url: str) -> Ask:
    async def ask(body: bytes) -> int:
        async with client.stream("POST", url + "/v1/chat/completions", headers=HEADERS, content=body) as answer:
            return sum([len(chunk) async for chunk in answer.aiter_raw()])

    return ask


@asynccontextmanager
async def httpx_own(url: str) -> AsyncIterator[Ask]:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, trust_env=False, timeout=30) as client:
        yield _asking(client, url)


@asynccontextmanager
async def httpx_aiohttp(url: str) -> AsyncIterator[Ask]:
    import httpx
    from httpx_aiohttp import HttpxAiohttpClient

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with HttpxAiohttpClient(limits=limits, trust_env=False, timeout=30) as client:
        yield _asking(client, url)


@asynccontextmanager
async def pyreqwest(url: str) -> AsyncIterator[Ask]:
    from pyreqwest.client import ClientBuilder

    async with ClientBuilder().no_proxy().timeout(timedelta(seconds=30)).build() as client:

        async def ask(body: bytes) -> int:
            request = client.post(url + "/v1/chat/completions").headers(HEADERS).body_bytes(body)
            size = 0
            async with request.build_streamed() as answer:
                while chunk := await answer.body_reader.read_chunk():
                    size += len(chunk)
            return size

        yield ask


CLIENTS: Final[dict[str, tuple[Client, str | None]]] = {
    "socket": (bare_socket, None),
    "transport": (transport, None),
    "aiohttp": (aiohttp_own, None),
    "httpx": (httpx_own, "httpx"),
    "httpx-aiohttp": (httpx_aiohttp, "httpx_aiohttp"),
    "pyreqwest": (pyreqwest, "pyreqwest"),
}
"""With the module that each needs."""


@dataclass(frozen=True, slots=True)
class Round:
    cpu_ms: float
    """Of this process, a request."""
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Row:
    client: str
    kind: str
    concurrent: int
    cpu_ms: float
    times_transport: float
    """CPU time against the gateway's own transport."""
    added_p50_ms: float
    p99_ms: float


async def measured(ask: Ask, sent: bytes, *, concurrent: int, for_s: float) -> Round:
    latencies: list[float] = []
    until = time.perf_counter() + for_s

    async def one_after_another() -> None:
        while (began := time.perf_counter()) < until or len(latencies) < 10:
            if not await ask(sent):
                raise SystemExit("the mock backend gave an empty answer")
            latencies.append(time.perf_counter() - began)

    cpu = time.process_time()
    async with asyncio.TaskGroup() as callers:
        for _ in range(concurrent):
            callers.create_task(one_after_another())
    cpu_ms = (time.process_time() - cpu) / len(latencies) * 1000
    cuts = statistics.quantiles(latencies, n=100)
    return Round(cpu_ms, cuts[49] * 1000, cuts[98] * 1000)


def median_of(rounds: Sequence[Round]) -> Round:
    return Round(
        statistics.median(each.cpu_ms for each in rounds),
        statistics.median(each.p50_ms for each in rounds),
        statistics.median(each.p99_ms for each in rounds),
    )


async def run(url: str, names: Sequence[str], *, rounds: int, for_s: float) -> list[Row]:
    cases = [("whole", concurrent) for concurrent in CONCURRENT] + [("stream", STREAMS_AT_ONCE)]
    rows: list[Row] = []
    async with AsyncExitStack() as clients:
        asks = {name: await clients.enter_async_context(CLIENTS[name][0](url)) for name in names}
        for kind, concurrent in cases:
            sent = body(stream=kind == "stream")
            found: dict[str, list[Round]] = {name: [] for name in names}
            for number in range(rounds + 1):
                for name, ask in asks.items():
                    seconds = for_s if number else for_s / 4
                    result = await measured(ask, sent, concurrent=concurrent, for_s=seconds)
                    if number:  # the first one warms up
                        found[name].append(result)
            medians = {name: median_of(results) for name, results in found.items()}
            rows += [
                Row(
                    name,
                    kind,
                    concurrent,
                    round(result.cpu_ms, 3),
                    round(result.cpu_ms / medians["transport"].cpu_ms, 2),
                    round(result.p50_ms - medians["socket"].p50_ms, 3),
                    round(result.p99_ms, 3),
                )
                for name, result in medians.items()
            ]
    return rows


def start_mock() -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("gateway_upstream.py"), str(port)])
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process, f"http://127.0.0.1:{port}"
        time.sleep(0.1)
    process.kill()
    raise SystemExit("the mock backend did not start")


def show(rows: Sequence[Row], missing: Sequence[str]) -> None:
    for name in missing:
        print(f"{name} is not installed and was left out: pip install {name}")
    print(f"{'client':<15}{'answers':<9}{'at once':>8}{'CPU ms':>9}{'x ours':>8}{'added p50 ms':>14}{'p99 ms':>9}")
    for row in rows:
        print(
            f"{row.client:<15}{row.kind:<9}{row.concurrent:>8}{row.cpu_ms:>9.3f}{row.times_transport:>8.2f}"
            f"{row.added_p50_ms:>14.3f}{row.p99_ms:>9.2f}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object of all figures")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    options = parser.parse_args(arguments)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    there = [name for name, (_, module) in CLIENTS.items() if module is None or importlib.util.find_spec(module)]
    missing = [name for name in CLIENTS if name not in there]
    mock, url = start_mock()
    try:
        rounds, for_s = (2, 0.3) if options.quick else (ROUNDS, 1.5)
        rows = uvloop.run(run(url, there, rounds=rounds, for_s=for_s))
    finally:
        mock.kill()
        mock.wait()
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "not_installed": missing}))
    else:
        show(rows, missing)


if __name__ == "__main__":
    main()
