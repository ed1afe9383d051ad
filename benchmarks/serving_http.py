"""Drives an OpenAI-compatible server through ``/v1/completions`` as streams, and starts our own worker to be driven."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from serving_workload import Ask, Timeline

from worker.protocol.sse import DONE, Event, Framer

_START_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it wants to be asked."""

    url: str
    """Without ``/v1``."""
    model: str
    api_key: str | None
    token_ids: bool
    """Whether prompts are sent as token ids; else as text."""
    ignore_eos: bool
    """Whether answers are asked to run to their full length, by a field that OpenAI's own service does not know."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Which requests run together. ``batch`` None: each is sent when it arrives, and the server batches.

    Else static batching: whenever nothing runs, those that have arrived, at most ``batch``, are sent together; the
    next ones wait until all of these have ended.
    """

    batch: int | None = None


async def drive(target: Target, asks: Sequence[Ask], gate: Gate, limit_s: float) -> tuple[list[Timeline], float]:
    """Send the workload; timelines in its order, and how long it took, ``limit_s`` seconds at most."""
    timelines = [Timeline(ask.arrival_s) for ask in asks]
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        began = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                if gate.batch is None:
                    await asyncio.gather(
                        *(_arrive(session, target, ask, line, began) for ask, line in zip(asks, timelines, strict=True))
                    )
                else:
                    await _static(session, target, asks, timelines, began, gate.batch)
        return timelines, time.perf_counter() - began


async def _arrive(session: aiohttp.ClientSession, target: Target, ask: Ask, line: Timeline, began: float) -> None:
    await asyncio.sleep(max(0.0, began + ask.arrival_s - time.perf_counter()))
    await _send(session, target, ask, line, began)


async def _static(
    session: aiohttp.ClientSession,
    target: Target,
    asks: Sequence[Ask],
    timelines: Sequence[Timeline],
    began: float,
    batch: int,
) -> None:
    at = 0
    while at < len(asks):
        await asyncio.sleep(max(0.0, began + asks[at].arrival_s - time.perf_counter()))
        now = time.perf_counter() - began
        end = at + 1
        while end < len(asks) and end - at < batch and asks[end].arrival_s <= now:
            end += 1
        await asyncio.gather(*(_send(session, target, asks[i], timelines[i], began) for i in range(at, end)))
        at = end


async def _send(session: aiohttp.ClientSession, target: Target, ask: Ask, line: Timeline, began: float) -> None:
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": ask.token_ids if target.token_ids else ask.text,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    framer = Framer()
    complete = False
    try:
        async with session.post(f"{target.url}/v1/completions", json=body) as response:
            if response.status != 200:
                line.error = f"{response.status}: {(await response.text())[:300]}"
                return
            async for chunk in response.content.iter_any():
                now = time.perf_counter() - began
                for frame in framer.feed(chunk):
                    if not isinstance(frame, Event):
                        continue
                    if frame.data == DONE:
                        complete = True
                        continue
                    event = json.loads(frame.data)
                    if "error" in event:
                        line.error = str(event["error"])
                        return
                    if usage := event.get("usage"):
                        line.tokens = usage["completion_tokens"]
                    if event.get("choices"):
                        line.pieces.append(now)
                        line.tokens += not usage and line.tokens < ask.max_tokens
    except (aiohttp.ClientError, ValueError) as fault:
        line.error = f"{type(fault).__name__}: {fault}"
        return
    if complete:
        line.ended_s = time.perf_counter() - began
    else:
        line.error = "the stream broke off"


@contextlib.contextmanager
def own_worker(model: str, threads: int, max_running: int) -> Iterator[Target]:
    """Our worker on loopback, without prefix caching: every side computes all of its prompts."""
    command = [sys.executable, "-m", "worker.cli", "serve", "--model", model, "--port", "0", "--no-prefix-caching"]
    command += ["--threads", str(threads), "--max-running", str(max_running), "--served-name", "bench"]
    root = Path(__file__).parent.parent
    with tempfile.TemporaryFile() as log:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        process = subprocess.Popen(command, stderr=log, stdout=log, cwd=root, env=environment)
        try:
            yield Target(_url_when_ready(process, log), "bench", None, token_ids=True, ignore_eos=True)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url_when_ready(process: subprocess.Popen[bytes], log: Any) -> str:
    deadline = time.monotonic() + _START_LIMIT_S
    while True:
        log.seek(0)
        said = log.read().decode(errors="replace")
        for text in said.splitlines():
            if text.startswith("{") and (entry := json.loads(text)).get("event") == "ready":
                return str(entry["url"])
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the worker did not start:\n{said}")
        time.sleep(0.1)
