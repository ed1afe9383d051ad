"""Threads of the CPU engine.

By default OpenMP's threads spin while they wait for each other. When the gateway, the databases or another worker want
the same cores, a spinning thread keeps the very thread it waits for from running, and a step takes many times longer.
``environment`` makes them spin briefly, then sleep. OpenMP reads it when torch is loaded, so whoever starts the engine
process passes it there; setting it inside the process is too late.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

_SPIN_COUNT: Final = 2000
"""Loop turns before a waiting thread sleeps: tens of microseconds, about the gap between two products of a step."""


def default_threads() -> int:
    """One for each core this process may use."""
    return len(os.sched_getaffinity(0))


def environment(threads: int | None, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` with the variables of OpenMP that an engine process wants; what ``base`` already sets is kept."""
    wanted = {
        "OMP_NUM_THREADS": str(threads or default_threads()),
        "GOMP_SPINCOUNT": str(_SPIN_COUNT),
        "MKL_NUM_THREADS": str(threads or default_threads()),
    }
    return {**wanted, **base}


def apply(threads: int | None) -> None:
    """Set the threads of one operation in this process."""
    import torch

    torch.set_num_threads(threads or default_threads())
