"""Puts an engine to sleep that nobody has asked for a while."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog

from worker.engine.client import ControlRefused, EngineClient, EngineDead

LEVEL: Final = 1
"""Weights stay in host memory: the next request waits for a copy, not for a load."""

log = structlog.get_logger("penstock.worker")


async def sleep_when_idle(engine: EngineClient, after_s: float) -> None:
    """Until cancelled: send the engine to sleep whenever it has been idle for ``after_s`` seconds.

    Requests wake it by themselves (``EngineClient.ensure_awake``), also one that comes while it falls asleep.
    """
    with contextlib.suppress(EngineDead):
        while True:
            rest_s = after_s - engine.idle_s
            if rest_s > 0 or engine.sleep_level:
                await asyncio.sleep(rest_s if rest_s > 0 else after_s)
                continue
            try:
                await engine.sleep(LEVEL)
                log.info("engine asleep", level=LEVEL, idle_s=after_s)
            except ControlRefused:
                await asyncio.sleep(after_s)  # a request was faster
