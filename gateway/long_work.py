"""Work on bodies, that takes time in proportion to their bytes: beside the event loop, if they are long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

LONG_BYTES: Final = 256 * 1024
"""From so many on; about 1 ms of reading JSON, or 5 of translating it."""
T = TypeVar("T")


def is_short(size: int) -> bool:
    """Whether ``worked`` would do it at once: who works for each request may spare itself the call."""
    return size < LONG_BYTES


async def worked(size: int, work: Callable[[], T]) -> T:
    """What ``work`` returns or raises. ``size``: bytes that it goes through."""
    return work() if is_short(size) else await asyncio.to_thread(work)
