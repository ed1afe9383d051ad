"""Threads of the CPU engine.

By default OpenMP's threads spin while they wait for each other. When the gateway, the databases or another worker want
the same cores, a spinning thread keeps the very thread it waits for from running, and a step takes many times longer.
``environment`` makes them spin briefly, then sleep. It also keeps each thread on a core of its own where the engine has
all cores to itself (a woken thread is otherwise often put on the core of the one that woke it), and asks for huge
pages: a decode step reads every weight once, and small pages cost it a tenth of its time or more. OpenMP and torch read
these when torch is loaded, so whoever starts the engine process passes them there; inside the process it is too late.
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
    """``base`` with the variables that an engine process wants; what ``base`` already sets is kept."""
    count = threads or default_threads()
    wanted = {
        "OMP_NUM_THREADS": str(count),
        "GOMP_SPINCOUNT": str(_SPIN_COUNT),
        "MKL_NUM_THREADS": str(count),
        # Else a small product's sums depend on which thread makes it, and attention on what else is in the batch.
        "MKL_CBWR": "AUTO",
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    # Bound threads of two engines that share a machine would all sit on its first cores.
    if 1 < count == default_threads() == os.cpu_count():
        wanted["OMP_PROC_BIND"] = "true"
    return {**wanted, **base}


def apply(threads: int | None) -> None:
    """Set the threads of one operation in this process."""
    import torch

    torch.set_num_threads(threads or default_threads())
