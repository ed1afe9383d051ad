"""Signed messages to a tenant's webhook, as the Standard Webhooks specification has them.

The message's id, its time and its body are signed with HMAC-SHA256, so that who holds the secret can tell that it came
from here and when. No redirect is followed, nothing of the answer but its status is read.

The address may be a private one: only administrators set it, and no answer is ever shown.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from types import TracebackType

import aiohttp

TIMEOUT_S = 10.0
_PREFIX = "whsec_"
_GONE = 410


class NotDelivered(Exception):
    """The message was not taken; the text says why. ``final``: asking again is of no use."""

    def __init__(self, reason: str, *, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """The header ``webhook-signature``. ``secret``: ``whsec_`` and base64; ``timestamp``: Unix seconds.

    Raises ValueError for a secret that is none.
    """
    if not secret.startswith(_PREFIX):
        raise ValueError("a webhook's secret begins with whsec_")
    key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    digest = hmac.digest(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256)
    return "v1," + base64.b64encode(digest).decode()


class Webhooks:
    """``async with``: its connections."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """``timeout_s``: for all of a message, from looking up the name to the status."""
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Webhooks:
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            connector=aiohttp.TCPConnector(limit=20, force_close=True),
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, url: str, secret: str, message_id: str, timestamp: int, body: bytes) -> int:
        """The status, of 200 to 299, with which the message was taken. Raises NotDelivered."""
        assert self._session is not None
        headers = {
            "content-type": "application/json",
            "user-agent": "penstock",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(secret, message_id, timestamp, body),
        }
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                status = response.status
        except TimeoutError:
            raise NotDelivered(f"no answer within {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as fault:
            # What the client says may name the path, in which some keep a secret.
            raise NotDelivered(f"could not be sent: {type(fault).__name__}") from fault
        if 200 <= status < 300:
            return status
        if 300 <= status < 400:
            raise NotDelivered(f"answered with status {status}; redirects are not followed")
        raise NotDelivered(f"answered with status {status}", final=status == _GONE)
