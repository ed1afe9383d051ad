"""When this process looks for garbage that only a collector finds: seldom, for a request is to leave none.

What stands after the start (modules, routes, compiled statements) is some hundred thousand objects. To walk through
them again and again took a seventh of the gateway's time under load.
"""

from __future__ import annotations

import gc
from typing import Final

YOUNG: Final = 25_000
"""Objects made and not yet freed before the young ones are looked through; some hundreds belong to each request that
runs. What idles so in reference cycles is a few megabytes at most."""


def settle() -> None:
    """To be called once, when all that stays has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
