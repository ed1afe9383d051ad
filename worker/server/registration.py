"""Keeps this worker registered with its gateway: the whole record again and again, until it withdraws."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Final
from urllib.parse import quote

import aiohttp
import msgspec
import structlog

from worker.protocol.fleet import HEARTBEAT_INTERVAL_S, WorkerRecord

_TIMEOUT_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 5.0
_WITHDRAW_TIMEOUT_S: Final = 1.0

log = structlog.get_logger("penstock.worker")


class Refused(Exception):
    """The gateway answered, but not with yes."""


class Registration:
    """Heartbeats to one gateway.

    Failures, a URL that can't be called among them, are retried with growing pauses and told once: a gateway that is
    away, or was emptied, needs nothing but the next heartbeat.
    """

    def __init__(
        self,
        gateway_url: str,
        fleet_token: str,
        record: Callable[[], WorkerRecord],
        *,
        interval_s: float = HEARTBEAT_INTERVAL_S,
    ) -> None:
        """``record``: what to say now; its ``worker_id`` never changes."""
        self._record = record
        self._url = f"{gateway_url.rstrip('/')}/internal/v1/workers/{quote(record().worker_id, safe='')}"
        self._headers = {"authorization": f"Bearer {fleet_token}", "content-type": "application/json"}
        self._interval_s = interval_s
        self._news = asyncio.Event()
        self._trouble: str | None = ""  # what was logged last; None while all is well

    async def run(self) -> None:
        """Register and stay registered, until cancelled. Cancelling does not withdraw."""
        pause = self._interval_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            while True:
                try:
                    await self._put(session)
                except (aiohttp.ClientError, TimeoutError, ValueError, Refused) as fault:
                    self._tell(str(fault) or type(fault).__name__)
                    pause = min(pause * 2, _LONGEST_PAUSE_S)
                else:
                    self._tell(None)
                    pause = self._interval_s
                # Workers that lost their gateway together must not all come back at the same moment.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause * random.uniform(0.8, 1.0)):
                        await self._news.wait()
                self._news.clear()

    def beat_now(self) -> None:
        """Tell the record as it is now, and not only when the next heartbeat is due."""
        self._news.set()

    async def withdraw(self) -> None:
        """Take the record back, so that no further request is sent here. A gateway that is away is left alone."""
        timeout = aiohttp.ClientTimeout(total=_WITHDRAW_TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.delete(self._url, headers=self._headers) as response,
            ):
                log.info("withdrawn from the gateway", status=response.status)
        except (aiohttp.ClientError, TimeoutError, ValueError) as fault:
            log.warning("could not withdraw from the gateway", error=str(fault) or type(fault).__name__)

    async def _put(self, session: aiohttp.ClientSession) -> None:
        body = msgspec.json.encode(self._record())
        async with session.put(self._url, data=body, headers=self._headers) as response:
            if response.status < 300:
                return
            said = (await response.content.read(500)).decode(errors="replace")
            if response.status in (401, 403):
                raise Refused("the gateway does not know this fleet token; set PENSTOCK_FLEET_TOKEN alike on both")
            raise Refused(f"the gateway answered {response.status}: {said}")

    def _tell(self, trouble: str | None) -> None:
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if trouble is None:
            log.info("registered with the gateway", url=self._url)
        else:
            log.warning("not registered with the gateway, trying again", url=self._url, error=trouble)
