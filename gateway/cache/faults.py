"""How faults are told: whence they came, and their words only where these are known to hold nothing of a prompt."""

from __future__ import annotations

from pathlib import Path
from traceback import extract_tb
from typing import Final

from gateway.admission.redis import RedisError, RedisUnavailable
from gateway.cache.embedder import EmbedderError
from gateway.datakeys.master_keys import UnknownMasterKey
from gateway.db.engine import DatabaseUnavailable

_FORESEEN: Final = (TimeoutError, RedisUnavailable, RedisError, DatabaseUnavailable, UnknownMasterKey, EmbedderError)


def told(fault: BaseException) -> str:
    """For a log."""
    if isinstance(fault, _FORESEEN):
        return f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__
    frames = extract_tb(fault.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return type(fault).__name__ + where
